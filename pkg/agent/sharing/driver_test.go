// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/config"
)

// host has fake programs in its PATH that write down how they were called. A unit runs if its file exists.
func host(t *testing.T) (opts DriverOptions, calls func() []string) {
	t.Helper()
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	script := func(name, body string) {
		text := "#!/bin/sh\n" + `echo "` + name + ` $*" >> ` + log + "\ncd " + dir + "\n" + body
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// A node without systemd has its programs all the same.
	const absent = `[ -e no-systemd ] && { echo "System has not been booted with systemd as init system (PID 1). Can't operate."; exit 1; }; `
	script("nvidia-smi", `[ -e broken ] && { echo "no devices were found"; exit 6; }; exit 0`)
	// With --wait it runs a program that reads commands, else it starts a unit.
	script("systemd-run", absent+`case "$*" in *--wait*) [ -e ready ] || { touch ready; exit 1; }; cat | sed "s/^/mps: /" >> `+log+`;; *) [ -e refuse ] && { echo "no such unit"; exit 1; }; touch unit;; esac`)
	script("systemctl", absent+`case $1 in is-active) [ -e ending ] && { echo deactivating; exit 3; }; [ -e unit ] || { echo inactive; exit 3; };; stop) [ -e slow ] && exec sleep 60; [ -e unstoppable ] && exit 1; rm -f unit ending; [ ! -e late ] || exit 5;; esac`)
	// Its help is long. It does not take the first command.
	script("nvidia-cuda-mps-control", `[ "$1" = --help ] && { [ -e old ] && { echo "invalid option"; exit 1; }; [ -e mute ] && exit 1; [ -e killed ] && { echo oops; kill -9 $$; }; [ -e hung ] && exec sleep 60;  head -c 3000 /dev/zero | tr '\0' ' '; echo "-M | --multiuser-server"; exit 1; }; [ -e deaf ] && exit 1; [ -e ready ] || { touch ready; exit 1; }; cat | sed "s/^/mps: /" >> `+log)
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	opts = DriverOptions{DriverRoot: "/", MPSRoot: filepath.Join(dir, "mps"), HostRoot: "/", ProcRoot: "/proc", mounts: fakeMounts{}, bootedRoot: dir}
	if err := os.MkdirAll(filepath.Join(dir, booted), 0o755); err != nil {
		t.Fatal(err)
	}
	return opts, func() []string {
		data, err := os.ReadFile(log)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		_ = os.Remove(log)
		return strings.Split(strings.TrimSpace(strings.ReplaceAll(string(data), dir, "DIR")), "\n")
	}
}

func TestTimeSliceIsSetByNVIDIASMI(t *testing.T) {
	opts, calls := host(t)
	tools := NewDriver(opts)
	for interval, number := range map[config.Interval]string{
		config.IntervalDefault: "0", config.IntervalShort: "1", config.IntervalMedium: "2", config.IntervalLong: "3",
	} {
		if err := tools.TimeSlicer.SetTimeSlice(t.Context(), "GPU-1", interval); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{"nvidia-smi compute-policy -i GPU-1 --set-timeslice " + number}, calls()); diff != "" {
			t.Errorf("%s: calls (-want +got):\n%s", interval, diff)
		}
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(opts.MPSRoot), "broken"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err := tools.TimeSlicer.SetTimeSlice(t.Context(), "GPU-1", config.IntervalLong)
	if err == nil || !strings.Contains(err.Error(), "no devices were found") || !strings.Contains(err.Error(), "GPU-1") {
		t.Errorf("error %v, want one that names the GPU and says what the program said", err)
	}
}

// sandboxed is what a daemon may still do, beside its folder's mounts.
func sandboxed(moreCapabilities, home string) string {
	return " --property=NoNewPrivileges=yes" +
		" --property=CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE CAP_FOWNER CAP_KILL CAP_SETGID CAP_SETUID" + moreCapabilities +
		" --property=ProtectSystem=strict --property=ReadWritePaths=DIR/mps/claim-1 --property=ProtectHome=" + home + " --property=PrivateTmp=yes" +
		" --property=ProtectControlGroups=yes --property=ProtectKernelModules=yes --property=ProtectKernelTunables=yes" +
		" --property=DevicePolicy=closed --property=DeviceAllow=char-nvidia* rw" +
		" --property=RestrictAddressFamilies=AF_UNIX AF_NETLINK --property=RestrictNamespaces=yes --property=RestrictRealtime=yes" +
		" --property=RestrictSUIDSGID=yes --property=LockPersonality=yes --property=SystemCallArchitectures=native"
}

// TestAnAdministratorCanDoWithoutTheSandbox, where a driver's daemon does not start in it. All else of the unit stays.
func TestAnAdministratorCanDoWithoutTheSandbox(t *testing.T) {
	opts, calls := host(t)
	opts.Unconfined = true
	for _, name := range []string{"claim-1", "claim-2"} {
		if err := NewDriver(opts).Daemons.Start(t.Context(), Daemon{Name: name, GPUs: []string{"GPU-1"}}); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(filepath.Dir(opts.MPSRoot), "unit")); err != nil {
			t.Fatal(err)
		}
		want := "systemd-run --quiet --collect --unit=stowage-mps-" + name + ".service --description=NVIDIA MPS control daemon of Stowage" +
			" --property=BindPaths=DIR/mps/" + name + "/shm:/dev/shm --setenv=CUDA_MPS_PIPE_DIRECTORY=DIR/mps/" + name + "/pipe" +
			" --setenv=CUDA_VISIBLE_DEVICES=GPU-1 --setenv=CUDA_MPS_LOG_DIRECTORY=DIR/mps/" + name + "/log nvidia-cuda-mps-control -f"
		if got := calls(); !slices.Contains(got, want) {
			t.Errorf("calls %q, want %q", got, want)
		}
	}
}

// TestSystemdKnowsTheSandbox: the one of this machine, if it has one, understands each property. systemd-run fails for one that it does not know.
func TestSystemdKnowsTheSandbox(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("there is no systemd-analyze")
	}
	for _, p := range []program{{path: control}, {path: "/usr/bin/" + control, root: "/run/nvidia/driver"}} {
		s := &systemd{folders{DriverOptions{MPSRoot: "/run/stowage/mps"}}}
		unit := "[Service]\nExecStart=/bin/true\n"
		for _, option := range s.sandbox(p, "claim-1") {
			unit += strings.TrimPrefix(option, "--property=") + "\n"
		}
		path := filepath.Join(t.TempDir(), "stowage-test.service")
		if err := os.WriteFile(path, []byte(unit), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.CommandContext(t.Context(), analyze, "verify", path).CombinedOutput()
		if err != nil || strings.Contains(string(out), "stowage-test.service:") {
			t.Errorf("%s\n%v: %s", unit, err, out)
		}
	}
}

// TestADaemonServesSeveralUsersWhereTheDriverCan: one that cannot is told by its help.
func TestADaemonServesSeveralUsersWhereTheDriverCan(t *testing.T) {
	const refusal = "sharing.mpsConfig.multiUser: the driver cannot do that: nvidia-cuda-mps-control has no option --multiuser-server"
	tests := map[string]struct {
		wanted MultiUser
		old    bool
		want   string // of the control program, no start if empty
	}{
		"one user at a time":         {wanted: MultiUserNo, want: " nvidia-cuda-mps-control -f"},
		"several":                    {wanted: MultiUserYes, want: " nvidia-cuda-mps-control -f --multiuser-server"},
		"several, an old driver":     {wanted: MultiUserYes, old: true},
		"if possible":                {wanted: MultiUserIfPossible, want: " nvidia-cuda-mps-control -f --multiuser-server"},
		"if possible, an old driver": {wanted: MultiUserIfPossible, old: true, want: " nvidia-cuda-mps-control -f"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			opts, calls := host(t)
			if tc.old {
				if err := os.WriteFile(filepath.Join(filepath.Dir(opts.MPSRoot), "old"), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			daemons, daemon := NewDriver(opts).Daemons, Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}, MultiUser: tc.wanted}
			if tc.want == "" {
				for act, do := range map[string]func(context.Context, Daemon) error{"check": daemons.Check, "start": daemons.Start} {
					if err := do(t.Context(), daemon); err == nil || !strings.Contains(err.Error(), refusal) {
						t.Errorf("%s: %v, want an error with %q", act, err, refusal)
					}
				}
				if list, err := daemons.List(); err != nil || len(list) > 0 {
					t.Errorf("there is something of %q, %v", list, err)
				}
				return
			}
			if err := daemons.Check(t.Context(), daemon); err != nil {
				t.Fatal(err)
			}
			if err := daemons.Start(t.Context(), daemon); err != nil {
				t.Fatal(err)
			}
			starts := slices.DeleteFunc(calls(), func(call string) bool { return !strings.HasPrefix(call, "systemd-run --quiet --collect --unit=") })
			if len(starts) != 1 || !strings.HasSuffix(starts[0], tc.want) {
				t.Errorf("starts %q, want one that ends in %q", starts, tc.want)
			}
		})
	}
}

// TestADriverThatDoesNotTellIsNotTakenForAnOldOne: a daemon for one user at a time would keep all but the first waiting, for as long as it runs.
func TestADriverThatDoesNotTellIsNotTakenForAnOldOne(t *testing.T) {
	const ask = "ask the program nvidia-cuda-mps-control for its options: "
	for happens, want := range map[string]string{
		"mute": "it says nothing", "killed": "signal: killed: oops", "hung": "context deadline exceeded", "not executable": "permission denied", "gone": "executable file not found",
		"old": "", // and that is the answer
	} {
		t.Run(happens, func(t *testing.T) {
			opts, _ := host(t)
			dir := filepath.Dir(opts.MPSRoot)
			program := filepath.Join(dir, control)
			var err error
			switch happens {
			case "gone":
				err = os.Remove(program)
			case "not executable":
				err = os.Chmod(program, 0o600)
			case "hung":
				opts.helpTimeout = time.Millisecond
				fallthrough
			default:
				err = os.WriteFile(filepath.Join(dir, happens), nil, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			daemons := NewDriver(opts).Daemons
			for _, wanted := range []MultiUser{MultiUserIfPossible, MultiUserYes} {
				err := daemons.Check(t.Context(), Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}, MultiUser: wanted})
				switch {
				case want == "" && wanted == MultiUserIfPossible:
					if err != nil {
						t.Errorf("%s: %v", wanted, err)
					}
				case err == nil || strings.Contains(err.Error(), ask) != (want != "") || !strings.Contains(err.Error(), want):
					t.Errorf("%s: %v, want an error with %q", wanted, err, want)
				}
			}
		})
	}
}

func TestMPSDaemonIsAUnitOfTheHost(t *testing.T) {
	opts, calls := host(t)
	daemons := NewDriver(opts).Daemons
	daemon := Daemon{Name: "claim-1", GPUs: []string{"GPU-1", "GPU-2"}, ActiveThreadPercentage: 50, MemoryMiB: []int64{0, 512}}
	if err := daemons.Start(t.Context(), daemon); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"systemctl is-active stowage-mps-claim-1.service",
		"systemd-run --quiet --collect --unit=stowage-mps-claim-1.service --description=NVIDIA MPS control daemon of Stowage" + sandboxed("", "yes") +
			" --property=BindPaths=DIR/mps/claim-1/shm:/dev/shm --setenv=CUDA_MPS_PIPE_DIRECTORY=DIR/mps/claim-1/pipe" +
			" --setenv=CUDA_VISIBLE_DEVICES=GPU-1,GPU-2 --setenv=CUDA_MPS_LOG_DIRECTORY=DIR/mps/claim-1/log nvidia-cuda-mps-control -f",
		"nvidia-cuda-mps-control ", // not ready yet
		"nvidia-cuda-mps-control ", "mps: get_server_list",
		"nvidia-cuda-mps-control ", "mps: set_default_active_thread_percentage 50",
		"nvidia-cuda-mps-control ", "mps: set_default_device_pinned_mem_limit 1 512M",
	}
	if diff := cmp.Diff(want[1:], calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	for name, mode := range map[string]os.FileMode{"pipe": 0o755, "log": 0o755, "shm": 0o777 | os.ModeSticky} {
		info, err := os.Stat(filepath.Join(opts.MPSRoot, "claim-1", name))
		if err != nil || info.Mode()&(os.ModePerm|os.ModeSticky) != mode {
			t.Errorf("folder %s: %v, %v", name, info, err)
		}
	}
	// It runs: it is left as it is.
	if err := daemons.Start(t.Context(), daemon); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want[:1], calls()); diff != "" {
		t.Errorf("calls when it runs (-want +got):\n%s", diff)
	}
	var mounts []string
	for _, mount := range daemons.Edits("claim-1").Mounts {
		mounts = append(mounts, strings.TrimPrefix(mount.HostPath, opts.MPSRoot)+" "+mount.ContainerPath)
	}
	if diff := cmp.Diff([]string{"/claim-1/pipe /tmp/nvidia-mps", "/claim-1/shm /dev/shm"}, mounts); diff != "" {
		t.Errorf("mounts (-want +got):\n%s", diff)
	}
	for range 2 { // the second time there is none
		if err := daemons.Stop(t.Context(), "claim-1"); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{want[0], "systemctl stop stowage-mps-claim-1.service"}, calls()); diff != "" {
		t.Errorf("calls to stop it (-want +got):\n%s", diff)
	}
	if _, err := os.Stat(filepath.Join(opts.MPSRoot, "claim-1")); !os.IsNotExist(err) {
		t.Errorf("its folder: %v", err)
	}
}

// TestWhereNoDaemonCanBeStarted is found out before one is, and changes nothing.
func TestWhereNoDaemonCanBeStarted(t *testing.T) {
	opts, calls := host(t)
	daemon := Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}}
	for range 2 {
		if err := NewDriver(opts).Daemons.Check(t.Context(), daemon); err != nil {
			t.Error(err)
		}
	}
	asked := "systemctl is-active stowage-mps-claim-1.service"
	if diff := cmp.Diff([]string{asked, asked}, calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	other := opts
	other.DriverRoot, other.HostDriverRoot = t.TempDir(), "/run/nvidia/driver"
	if err := NewDriver(other).Daemons.Check(t.Context(), daemon); err == nil || !strings.Contains(err.Error(), control) {
		t.Errorf("a driver without the program: %v", err)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(opts.MPSRoot), "no-systemd"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := NewDriver(opts).Daemons.Check(t.Context(), daemon); err == nil || !strings.Contains(err.Error(), "not been booted with systemd") {
		t.Errorf("a host without systemd: %v", err)
	}
	if _, err := os.Stat(opts.MPSRoot); !os.IsNotExist(err) {
		t.Errorf("a folder is left: %v", err)
	}
}

// TestADaemonGetsItsLimitsAlsoFromTheNextAgent: the one that started it may have ended before it set them.
func TestADaemonGetsItsLimitsAlsoFromTheNextAgent(t *testing.T) {
	opts, calls := host(t)
	daemons := NewDriver(opts).Daemons
	daemon := Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}, ActiveThreadPercentage: 50}
	dir := filepath.Dir(opts.MPSRoot)
	file := func(name string) string { return filepath.Join(dir, name) }
	touch := func(name string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(file(name)), 0o755), os.WriteFile(file(name), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	asked := "systemctl is-active stowage-mps-claim-1.service"
	limited := []string{"nvidia-cuda-mps-control ", "mps: get_server_list", "nvidia-cuda-mps-control ", "mps: set_default_active_thread_percentage 50"}
	touch("ready")
	touch("unit")
	touch("mps/claim-1/pipe/control")

	// It does not take commands: it stays, and has no limits still.
	touch("deaf")
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := daemons.Start(ctx, daemon); err == nil || !strings.Contains(err.Error(), "claim-1") {
		t.Errorf("no limits are set: %v", err)
	}
	if got := calls(); slices.ContainsFunc(got, func(call string) bool { return strings.HasPrefix(call, "systemctl stop") }) {
		t.Errorf("a daemon that may have clients is ended: %q", got)
	}
	if err := os.Remove(file("deaf")); err != nil {
		t.Fatal(err)
	}
	for _, want := range [][]string{append([]string{asked}, limited...), {asked}} {
		if err := daemons.Start(t.Context(), daemon); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, calls()); diff != "" {
			t.Errorf("it runs: calls (-want +got):\n%s", diff)
		}
	}
	// It has ended and is started, and the agent ends again before it has set the limits.
	if err := os.Remove(file("unit")); err != nil {
		t.Fatal(err)
	}
	touch("deaf")
	touch("unstoppable")
	ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := daemons.Start(ctx, daemon); err == nil {
		t.Error("no limits are set, and it is no error")
	}
	calls()
	if err := errors.Join(os.Remove(file("deaf")), os.Remove(file("unstoppable"))); err != nil {
		t.Fatal(err)
	}
	if ready, err := daemons.Ready(t.Context(), daemon); ready || err != nil {
		t.Errorf("without its limits: ready %t, %v", ready, err)
	}
	calls()
	if err := daemons.Start(t.Context(), daemon); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(append([]string{asked}, limited...), calls()); diff != "" {
		t.Errorf("it was started without limits: calls (-want +got):\n%s", diff)
	}
	if ready, err := daemons.Ready(t.Context(), daemon); !ready || err != nil {
		t.Errorf("with its limits: ready %t, %v", ready, err)
	}
}

// TestADaemonThatIsStillEndingIsNotGone: systemd waits up to a minute and a half for its processes, and they have the GPU open as long.
func TestADaemonThatIsStillEndingIsNotGone(t *testing.T) {
	opts, _ := host(t)
	daemons := NewDriver(opts).Daemons
	if err := daemons.Start(t.Context(), Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}}); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Dir(opts.MPSRoot)
	for _, file := range []string{"ending", "unstoppable"} {
		if err := os.WriteFile(filepath.Join(dir, file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := daemons.Stop(t.Context(), "claim-1"); err == nil || !strings.Contains(err.Error(), "claim-1") {
		t.Errorf("it has not ended: %v", err)
	}
	if running, err := daemons.Running(t.Context(), "claim-1"); !running || err != nil {
		t.Errorf("running: %v, %v", running, err)
	}
	if err := os.Remove(filepath.Join(dir, "unstoppable")); err != nil {
		t.Fatal(err)
	}
	if err := daemons.Stop(t.Context(), "claim-1"); err != nil {
		t.Error(err)
	}
	if running, err := daemons.Running(t.Context(), "claim-1"); running || err != nil {
		t.Errorf("running in the end: %v, %v", running, err)
	}
}

// A daemon is stopped for each of its GPUs. Who comes second hears of systemd that there is none.
func TestADaemonMayHaveBeenStoppedMeanwhile(t *testing.T) {
	opts, _ := host(t)
	daemons := NewDriver(opts).Daemons
	if err := daemons.Start(t.Context(), Daemon{Name: "claim-1", GPUs: []string{"GPU-1", "GPU-2"}}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(opts.MPSRoot), "late"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := daemons.Stop(t.Context(), "claim-1"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(opts.MPSRoot, "claim-1")); !os.IsNotExist(err) {
		t.Errorf("its folder: %v", err)
	}
}

func TestThePodOfAProcess(t *testing.T) {
	const uid = "7b6b5d2e-0000-4000-8000-000000000001"
	tests := map[string]struct{ cgroup, want string }{
		"systemd driver":         {"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod7b6b5d2e_0000_4000_8000_000000000001.slice/cri-containerd-1f.scope\n", uid},
		"systemd, guaranteed":    {"0::/kubepods.slice/kubepods-pod7b6b5d2e_0000_4000_8000_000000000001.slice/cri-containerd-1f.scope\n", uid},
		"cgroupfs driver":        {"0::/kubepods/besteffort/pod" + uid + "/1f\n", uid},
		"cgroup v1":              {"12:cpu:/\n11:devices:/kubepods/pod" + uid + "/1f\n", uid},
		"static pod":             {"0::/kubepods/pod0123456789abcdef0123456789abcdef/1f\n", "0123456789abcdef0123456789abcdef"},
		"a kubelet in a node":    {"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod7b6b5d2e_0000_4000_8000_000000000001.slice/x\n", uid},
		"seen from another pod":  {"0::/../../pod" + uid + "/1f\n", uid},
		"and from another class": {"0::/../../../kubepods-pod7b6b5d2e_0000_4000_8000_000000000001.slice/cri-containerd-1f.scope\n", uid},
		"a cluster within a pod": {"0::/kubepods/burstable/pod" + uid + "/1f/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod7b6b5d2e_0000_4000_8000_000000000002.slice/x\n", uid},
		"a service":              {"0::/system.slice/nvidia-dcgm.service\n", ""},
		"a name that only looks": {"0::/user.slice/pod" + uid + "/x\n", ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			proc := t.TempDir()
			if err := os.Mkdir(filepath.Join(proc, "42"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(proc, "42", "cgroup"), []byte(tc.cgroup), 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := (&processes{proc: proc}).PodOf(42)
			if err != nil || string(got) != tc.want {
				t.Errorf("pod %q, %v: want %q", got, err, tc.want)
			}
		})
	}
}

func TestTheDaemonOfAProcess(t *testing.T) {
	const pod = "/kubepods/pod7b6b5d2e-0000-4000-8000-000000000001/x"
	tests := map[string]struct{ cgroup, want string }{
		"a claim's":                   {"0::/system.slice/stowage-mps-7b6b5d2e-0000.service\n", "7b6b5d2e-0000"},
		"a GPU's, cgroup v1":          {"12:cpu:/\n1:name=systemd:/system.slice/stowage-mps-gpu-0000-1b-00-0.service\n", "gpu-0000-1b-00-0"},
		"seen from a container":       {"0::/../../../system.slice/stowage-mps-gpu-0000-1b-00-0.service\n", "gpu-0000-1b-00-0"},
		"in a cgroup of its own":      {"0::/stowage-mps/7b6b5d2e-0000\n", "7b6b5d2e-0000"},
		"of v1, and others":           {"8:pids:/stowage-mps/gpu-0000-1b-00-0\n7:blkio:/\n", "gpu-0000-1b-00-0"},
		"own, seen from a container":  {"0::/../../../stowage-mps/7b6b5d2e-0000\n", "7b6b5d2e-0000"},
		"a pod's that looks like own": {"0::" + pod + "/stowage-mps/7b6b5d2e-0000\n", ""},
		"not at the root":             {"0::/user.slice/stowage-mps/7b6b5d2e-0000\n", ""},
		"the parent":                  {"0::/stowage-mps\n", ""},
		"another service":             {"0::/system.slice/nvidia-mps.service\n", ""},
		"a pod's":                     {"0::" + pod + "\n", ""},
		"a pod's that looks like one": {"0::" + pod + "/system.slice/stowage-mps-gpu-0000-1b-00-0.service\n", ""},
		"a user's that looks like one": {
			"0::/user.slice/user-1000.slice/user@1000.service/app.slice/stowage-mps-gpu-0000-1b-00-0.service\n", "",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			proc := t.TempDir()
			if err := os.Mkdir(filepath.Join(proc, "42"), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(proc, "42", "cgroup"), []byte(tc.cgroup), 0o600); err != nil {
				t.Fatal(err)
			}
			p := &processes{proc: proc}
			if got, err := p.DaemonOf(42); err != nil || got != tc.want {
				t.Errorf("daemon %q, %v: want %q", got, err, tc.want)
			}
			if got, err := p.DaemonOf(43); !errors.Is(err, ErrNoProcess) {
				t.Errorf("one that has ended: %q, %v", got, err)
			}
		})
	}
}

// TestTheNameOfAProcess is what the process says, which may be anything, fit to be shown.
func TestTheNameOfAProcess(t *testing.T) {
	for comm, want := range map[string]string{
		"nvidia-persiste\n":     "nvidia-persiste",
		"тест 1\n":              "тест 1",
		"\xff\x1b[2J\nx\u202ey": "??[2J?x?y",
	} {
		proc := t.TempDir()
		if err := os.Mkdir(filepath.Join(proc, "42"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(proc, "42", "comm"), []byte(comm), 0o600); err != nil {
			t.Fatal(err)
		}
		p := &processes{proc: proc}
		if name, err := p.NameOf(42); name != want || err != nil {
			t.Errorf("%q: %q, %v, want %q", comm, name, err, want)
		}
		if name, err := p.NameOf(43); !errors.Is(err, ErrNoProcess) {
			t.Errorf("one that has ended: %q, %v", name, err)
		}
	}
}

// TestAProcessIsEndedForItsPodAlone kills a real one, whose cgroup file is a fake.
func TestAProcessIsEndedForItsPodAlone(t *testing.T) {
	const uid = "7b6b5d2e-0000-4000-8000-000000000001"
	sleep := exec.Command("sleep", "600")
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- sleep.Wait() }()
	pid := uint32(sleep.Process.Pid)
	proc := t.TempDir()
	dir := filepath.Join(proc, strconv.Itoa(int(pid)))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup"), []byte("0::/kubepods/pod"+uid+"/x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &processes{proc: proc}
	if err := p.End(pid, "another"); err == nil || strings.Contains(err.Error(), uid) {
		t.Errorf("for another pod: %v, want a refusal that does not name the pod", err)
	}
	select {
	case <-ended:
		t.Fatal("ended for another pod")
	default:
	}
	if err := p.End(pid, uid); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("the process ended with %v", err)
	}
	if err := p.End(pid, uid); err != nil {
		t.Errorf("one that is gone: %v", err)
	}
}

// TestADaemonThatDoesNotEndIsNotWaitedForWhenItIsStarted: who undoes the start does that, in the time that there is for it.
func TestADaemonThatDoesNotEndIsNotWaitedForWhenItIsStarted(t *testing.T) {
	opts, _ := host(t)
	dir := filepath.Dir(opts.MPSRoot)
	for _, file := range []string{"deaf", "slow"} {
		if err := os.WriteFile(filepath.Join(dir, file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- NewDriver(opts).Daemons.Start(ctx, Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}}) }()
	select {
	case err := <-done:
		if err == nil || !strings.Contains(err.Error(), "claim-1") {
			t.Errorf("error %v, want that it does not take commands", err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("its start has not come to an end")
	}
}
