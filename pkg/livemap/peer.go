// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
)

// ours tells whether a user may have the token for the code: the one that runs the command, and root, as whom Windows' browsers come to
// WSL.
func ours(uid int) bool { return uid == os.Getuid() || uid == 0 }

// stranger tells why a request is not of a process of ours, by the kernel's tables of connections
// (https://docs.kernel.org/networking/proc_net_tcp.html). Other systems than Linux have none.
func stranger(r *http.Request, ours func(uid int) bool) error {
	if runtime.GOOS != "linux" {
		return nil
	}
	_, theirs, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return err
	}
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if !ok {
		return fmt.Errorf("the connection from %s has no address here", r.RemoteAddr)
	}
	client, err := strconv.Atoi(theirs)
	if err != nil {
		return err
	}
	found := false
	for _, name := range []string{"tcp", "tcp6"} { // a program may reach IPv4 through IPv6's sockets
		table, err := os.ReadFile(filepath.Join("/proc/self/net", name))
		if err != nil && !os.IsNotExist(err) { // a kernel may have no IPv6
			return err
		}
		for _, uid := range usersOf(string(table), client, local.Port) {
			if found = true; !ours(uid) {
				return fmt.Errorf("the connection from %s is of user %d", r.RemoteAddr, uid)
			}
		}
	}
	if !found {
		return fmt.Errorf("the connection from %s is of nobody on this machine", r.RemoteAddr)
	}
	return nil
}

// usersOf are the users of connections from a port to another one. The other ends of these connections are ours, and not among them.
func usersOf(table string, from, to int) (uids []int) {
	for line := range strings.Lines(table) {
		fields := strings.Fields(line)
		if len(fields) < 8 || !strings.HasSuffix(fields[1], fmt.Sprintf(":%04X", from)) ||
			!strings.HasSuffix(fields[2], fmt.Sprintf(":%04X", to)) {
			continue
		}
		if uid, err := strconv.Atoi(fields[7]); err == nil {
			uids = append(uids, uid)
		}
	}
	return uids
}
