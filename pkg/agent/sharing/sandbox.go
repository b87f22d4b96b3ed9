// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

// sandbox are options of systemd-run that take from a daemon what it has no use for: it is root, and what it reads are its clients' files
// and messages. All of them are older than systemd 243, as one that systemd does not know would keep the daemon from its start. There is no
// limit of memory or tasks but systemd's own: to reach one would end the clients of all tenants.
func (s *systemd) sandbox(p program, name string) []string {
	if s.opts.Unconfined {
		return nil
	}
	// The capabilities are for sockets, files and servers of the clients' users. A driver's root is entered by chroot.
	capabilities, home := "CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER CAP_KILL CAP_SETGID CAP_SETUID", "yes"
	if p.root != "" {
		capabilities += " CAP_SYS_CHROOT"
	}
	if p.root != "" || len(p.env) > 0 {
		home = "read-only" // some hosts have the driver's files below /home
	}
	var options []string
	for _, property := range []string{
		"NoNewPrivileges=yes",
		"CapabilityBoundingSet=" + capabilities,
		// All is read-only but /dev, and the folder of this daemon.
		"ProtectSystem=strict",
		"ReadWritePaths=" + s.dir(name),
		"ProtectHome=" + home,
		"PrivateTmp=yes",
		"ProtectControlGroups=yes",
		"ProtectKernelModules=yes",
		"ProtectKernelTunables=yes",
		// The driver's devices, by the names that /proc/devices has, beside /dev/null and the like.
		"DevicePolicy=closed",
		"DeviceAllow=char-nvidia* rw",
		// The network stays the host's: with one of its own a daemon would not find abstract sockets.
		"RestrictAddressFamilies=AF_UNIX AF_NETLINK",
		"RestrictNamespaces=yes",
		"RestrictRealtime=yes",
		"RestrictSUIDSGID=yes",
		"LockPersonality=yes",
		"SystemCallArchitectures=native",
	} {
		options = append(options, "--property="+property)
	}
	return options
}
