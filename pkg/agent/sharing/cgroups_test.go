// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"

	"stowage.dev/stowage/pkg/agent/sharing/internal/confine"
)

// agentCommand has this test program be an agent that starts daemons, below the folder of its second argument, and goes on.
const agentCommand = "an-agent"

// beAnother has this test program be a helper, or an agent, if it was run as one.
func beAnother() {
	switch {
	case len(os.Args) == 2 && os.Args[1] == HelperCommand:
		fmt.Fprintln(os.Stderr, Become(os.Stdin))
		os.Exit(1)
	case len(os.Args) > 3 && os.Args[1] == agentCommand:
		d := inCgroups(optionsBelow(os.Args[2]))
		for _, name := range os.Args[3:] {
			if err := d.Start(context.Background(), Daemon{Name: name, GPUs: []string{"GPU-1"}, ActiveThreadPercentage: 50}); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
		}
		fmt.Println("all are started")
		select {}
	}
}

// controlScript is a control program. As the daemon it has a server, and says what it has been given. Else it gives the daemon commands.
const controlScript = `#!/bin/sh
case "$1" in
--help) echo "-M | --multiuser-server";;
-f)
	[ -e BASE/broken ] && { echo "no device was found"; exit 1; }
	echo "$*" > $CUDA_MPS_LOG_DIRECTORY/options
	env > $CUDA_MPS_LOG_DIRECTORY/env
	id -u > $CUDA_MPS_LOG_DIRECTORY/user
	BASE/driver/bin/nvidia-cuda-mps-server &
	touch $CUDA_MPS_PIPE_DIRECTORY/control
	wait;;
*)
	[ -e $CUDA_MPS_PIPE_DIRECTORY/control ] || { echo "no daemon"; exit 1; }
	cat >> /tmp/nvidia-log/commands;;
esac
`

func optionsBelow(base string) DriverOptions {
	driver := filepath.Join(base, "driver")
	return DriverOptions{
		DriverRoot: driver, HostDriverRoot: driver, MPSRoot: filepath.Join(base, "mps"), HostRoot: "/", ProcRoot: "/proc",
		ShmBytes: 1 << 20, helpTimeout: defaultHelpTimeout,
	}
}

func inCgroups(opts DriverOptions) *daemons {
	f := folders{opts}
	return &daemons{f, &cgroups{f}}
}

// noSystemd is a host with a driver in a folder, of which the programs are scripts. All else is real. Its daemons end with the test.
func noSystemd(t *testing.T, names ...string) (base string, d *daemons) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	if _, err := inCgroups(optionsBelow("/")).on.(*cgroups).how(); err != nil {
		t.Skipf("cgroups cannot be made here: %v", err)
	}
	base, err := os.MkdirTemp("/var/tmp", "stowage-test-") // a daemon has a /tmp of its own
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(base, "driver", "bin")
	err = errors.Join(os.Chmod(base, 0o755), os.MkdirAll(bin, 0o755),
		os.WriteFile(filepath.Join(bin, control), []byte(strings.ReplaceAll(controlScript, "BASE", base)), 0o755),
		os.WriteFile(filepath.Join(bin, "nvidia-cuda-mps-server"), []byte("#!/bin/sh\nsleep 1000 & wait\n"), 0o755))
	if err != nil {
		t.Fatal(err)
	}
	d = inCgroups(optionsBelow(base))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for _, name := range names {
			if err := d.Stop(ctx, name); err != nil {
				t.Error(err)
			}
			nothingOf(t, d, name)
		}
		if err := os.RemoveAll(base); err != nil {
			t.Error(err)
		}
		// An agent of this machine may have daemons beside.
		parents, err := filepath.Glob("/sys/fs/cgroup/*/" + confine.Parent)
		for _, parent := range append(parents, "/sys/fs/cgroup/"+confine.Parent) {
			_ = unix.Rmdir(parent)
		}
		if err != nil {
			t.Error(err)
		}
	})
	return base, d
}

func groupOf(t *testing.T, d *daemons, name string) *confine.Group {
	t.Helper()
	g, err := d.on.(*cgroups).group(name)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func pidsOf(t *testing.T, d *daemons, name string) []int {
	t.Helper()
	pids, err := groupOf(t, d, name).Processes()
	if err != nil {
		t.Fatal(err)
	}
	return pids
}

// nothingOf the daemon is there: no cgroup, process, mount or file.
func nothingOf(t *testing.T, d *daemons, name string) {
	t.Helper()
	if names, err := d.List(); err != nil || slices.Contains(names, name) {
		t.Errorf("something is there of %s: %q, %v", name, names, err)
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*/" + confine.Parent + "/" + name, "/sys/fs/cgroup/" + confine.Parent + "/" + name, d.dir(name) + "*"} {
		if left, err := filepath.Glob(pattern); err != nil || len(left) > 0 {
			t.Errorf("of %s there is %q, %v", name, left, err)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), d.dir(name)+" ") {
		t.Errorf("a mount of %s is left: %v", name, err)
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return is(), nil }); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func contents(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestADaemonWithoutSystemd has its server, its limits and its folders, beside another one, and is what the process table says it is.
func TestADaemonWithoutSystemd(t *testing.T) {
	base, d := noSystemd(t, "claim-1", "claim-2")
	one := Daemon{Name: "claim-1", GPUs: []string{"GPU-1", "GPU-2"}, ActiveThreadPercentage: 50, MemoryMiB: []int64{0, 512}, MultiUser: MultiUserYes}
	two := Daemon{Name: "claim-2", GPUs: []string{"GPU-3"}}
	for _, daemon := range []Daemon{one, two} {
		if err := d.Check(t.Context(), daemon); err != nil {
			t.Fatal(err)
		}
		nothingOf(t, d, daemon.Name)
		if err := d.Start(t.Context(), daemon); err != nil {
			t.Fatal(err)
		}
	}
	for _, daemon := range []Daemon{one, two} {
		if ready, err := d.Ready(t.Context(), daemon); !ready || err != nil {
			t.Errorf("%s: ready %t, %v", daemon.Name, ready, err)
		}
	}
	const first = "get_server_list\n"
	for name, want := range map[string]map[string]string{
		"claim-1": {"options": "-f --multiuser-server\n", "user": "0\n", "commands": first + "set_default_active_thread_percentage 50\nset_default_device_pinned_mem_limit 1 512M\n"},
		"claim-2": {"options": "-f\n", "commands": first},
	} {
		for file, text := range want {
			if got := contents(t, d.dir(name, logFolder, file)); got != text {
				t.Errorf("%s: %s %q, want %q", name, file, got, text)
			}
		}
	}
	env := strings.Split(contents(t, d.dir("claim-1", logFolder, "env")), "\n")
	for _, want := range []string{"CUDA_VISIBLE_DEVICES=GPU-1,GPU-2", "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", "LD_LIBRARY_PATH="} {
		if !slices.Contains(env, want) {
			t.Errorf("environment %q, want %s", env, want)
		}
	}
	if slices.ContainsFunc(env, func(variable string) bool { return strings.HasPrefix(variable, "HOME=") }) {
		t.Errorf("it has the agent's environment: %q", env)
	}
	// All its processes are its own by the process table, and what it sees of the other one is nothing.
	eventually(t, "it has its server", func() bool { return len(pidsOf(t, d, "claim-1")) == 3 })
	table := &processes{proc: "/proc"}
	for _, pid := range pidsOf(t, d, "claim-1") {
		if of, err := table.DaemonOf(uint32(pid)); of != "claim-1" || err != nil {
			t.Errorf("process %d is of daemon %q, %v", pid, of, err)
		}
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/root%s/mps/claim-2", pid, base)); !os.IsNotExist(err) {
			t.Errorf("it sees the folder of the other one: %v", err)
		}
		score := contents(t, fmt.Sprintf("/proc/%d/oom_score_adj", pid))
		if strings.HasPrefix(score, "-") {
			t.Errorf("the kernel spares it when memory is short: %s", score)
		}
	}
	if err := d.Stop(t.Context(), "claim-1"); err != nil {
		t.Fatal(err)
	}
	nothingOf(t, d, "claim-1")
	if ready, err := d.Ready(t.Context(), two); !ready || err != nil {
		t.Errorf("the other one: ready %t, %v", ready, err)
	}
}

// TestTheLimitsOfADaemon are parts of what the node has.
func TestTheLimitsOfADaemon(t *testing.T) {
	proc := t.TempDir()
	write := func(file, text string) {
		t.Helper()
		path := filepath.Join(proc, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	write("sys/kernel/pid_max", "4000\n")
	write("sys/kernel/threads-max", "2000\n")
	write("meminfo", "MemFree: 1 kB\nMemTotal:       1024 kB\n")
	limits, err := limitsOf(proc)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, limit := range limits {
		got[limit.V2] = limit.Value
	}
	for file, want := range map[string]string{"memory.max": "524288", "memory.oom.group": "1", "pids.max": "300"} {
		if got[file] != want {
			t.Errorf("%s is %q, want %q", file, got[file], want)
		}
	}
	write("meminfo", "MemFree: 1 kB\n")
	if _, err := limitsOf(proc); err == nil || !strings.Contains(err.Error(), "meminfo has no MemTotal") {
		t.Errorf("no MemTotal: %v", err)
	}
	write("sys/kernel/pid_max", "many\n")
	if _, err := limitsOf(proc); err == nil || !strings.Contains(err.Error(), "pid_max") || !strings.Contains(err.Error(), "many") {
		t.Errorf("a number that is none: %v", err)
	}
}

// TestTheNextAgentFindsDaemons that an agent has started, which was killed with all its process group: they go on, with their limits.
func TestTheNextAgentFindsDaemons(t *testing.T) {
	base, d := noSystemd(t, "claim-1", "claim-2")
	agent := exec.Command("/proc/self/exe", agentCommand, base, "claim-1", "claim-2")
	agent.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := agent.StdoutPipe()
	if err == nil {
		err = agent.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 1000)
	n, err := out.Read(said)
	if err := errors.Join(err, unix.Kill(-agent.Process.Pid, unix.SIGKILL)); err != nil {
		t.Error(err)
	}
	if err := agent.Wait(); err == nil || string(said[:n]) != "all are started\n" {
		t.Fatalf("the agent: %v: %s", err, said[:n])
	}
	before := map[string][]int{}
	for _, name := range []string{"claim-1", "claim-2"} {
		daemon := Daemon{Name: name, GPUs: []string{"GPU-1"}, ActiveThreadPercentage: 50}
		eventually(t, "it has its server", func() bool { return len(pidsOf(t, d, name)) == 3 })
		before[name] = pidsOf(t, d, name)
		if ready, err := d.Ready(t.Context(), daemon); !ready || err != nil {
			t.Errorf("%s: ready %t, %v", name, ready, err)
		}
		if err := d.Start(t.Context(), daemon); err != nil {
			t.Error(err)
		}
		if now := pidsOf(t, d, name); !slices.Equal(now, before[name]) {
			t.Errorf("%s was %v, and is started again: %v", name, before[name], now)
		}
	}
}

// joinGroup puts a process into the cgroup of the daemon, which is made.
func joinGroup(t *testing.T, name string, pid int) {
	t.Helper()
	files, err := filepath.Glob("/sys/fs/cgroup/*/" + confine.Parent + "/" + name + "/cgroup.procs")
	more, err2 := filepath.Glob("/sys/fs/cgroup/" + confine.Parent + "/" + name + "/cgroup.procs")
	if err := errors.Join(err, err2); err != nil || len(files)+len(more) == 0 {
		t.Fatalf("no cgroup: %v", err)
	}
	for _, file := range append(files, more...) {
		if err := os.WriteFile(file, []byte(strconv.Itoa(pid)), 0); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAnAgentIsKilledBetweenTwoSteps of a start: whatever is there, the next one can start the daemon, and can take it away.
func TestAnAgentIsKilledBetweenTwoSteps(t *testing.T) {
	daemon := Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}, ActiveThreadPercentage: 50}
	const ending = "a daemon that is asked to end"
	foreign := func(t *testing.T, d *daemons) *exec.Cmd {
		t.Helper()
		cmd := exec.Command("sleep", "1000")
		if err := errors.Join(groupOf(t, d, daemon.Name).Make(), cmd.Start()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		return cmd
	}
	tests := map[string]struct {
		before  func(t *testing.T, base string, d *daemons)
		running bool
		listed  bool
	}{
		"nothing yet": {before: func(*testing.T, string, *daemons) {}},
		"its folder": {listed: true, before: func(t *testing.T, _ string, d *daemons) {
			if err := d.makeFolder(daemon.Name); err != nil {
				t.Fatal(err)
			}
		}},
		"a cgroup alone, as of a folder that has gone": {listed: true, before: func(t *testing.T, _ string, d *daemons) {
			if err := groupOf(t, d, daemon.Name).Make(); err != nil {
				t.Fatal(err)
			}
		}},
		"a cgroup in one hierarchy": {listed: true, before: func(t *testing.T, _ string, d *daemons) {
			if err := groupOf(t, d, daemon.Name).Make(); err != nil {
				t.Fatal(err)
			}
			if path := "/sys/fs/cgroup/pids/" + confine.Parent + "/" + daemon.Name; unix.Access(path, unix.F_OK) == nil {
				if err := unix.Rmdir(path); err != nil {
					t.Fatal(err)
				}
			}
		}},
		"processes that are none of a daemon's": {listed: true, before: func(t *testing.T, _ string, d *daemons) {
			joinGroup(t, daemon.Name, foreign(t, d).Process.Pid)
		}},
		"a daemon without its limits": {running: true, listed: true, before: func(t *testing.T, _ string, d *daemons) {
			if err := errors.Join(d.Start(t.Context(), daemon), os.Remove(d.limitedFile(daemon.Name))); err != nil {
				t.Fatal(err)
			}
		}},
		"the server of a daemon that was killed": {listed: true, before: func(t *testing.T, _ string, d *daemons) {
			if err := d.Start(t.Context(), daemon); err != nil {
				t.Fatal(err)
			}
			eventually(t, "it has its server", func() bool { return len(pidsOf(t, d, daemon.Name)) == 3 })
			pid, held, err := d.on.(*cgroups).daemonProcess(groupOf(t, d, daemon.Name), control)
			if err != nil || pid == 0 {
				t.Fatalf("process %d, %v", pid, err)
			}
			if err := errors.Join(unix.PidfdSendSignal(held, unix.SIGKILL, nil, 0), unix.Close(held)); err != nil {
				t.Fatal(err)
			}
			eventually(t, "it has ended", func() bool { return len(pidsOf(t, d, daemon.Name)) == 2 })
		}},
		ending: {running: true, listed: true, before: func(t *testing.T, _ string, d *daemons) {
			if err := d.Start(t.Context(), daemon); err != nil {
				t.Fatal(err)
			}
			over, cancel := context.WithCancel(t.Context())
			cancel()
			for _, pid := range pidsOf(t, d, daemon.Name) {
				if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				// Of two signals that a process has not seen yet it would take SIGTERM first.
				eventually(t, "it stands still", func() bool {
					stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
					return err == nil && bytes.Contains(stat, []byte(") T "))
				})
			}
			if err := d.Stop(over, daemon.Name); err == nil {
				t.Error("it is not waited for, and it is no error")
			}
		}},
	}
	for name, tc := range tests {
		for _, next := range []string{"starts it", "takes it away"} {
			if next == "starts it" && name == ending {
				continue // its claim is about to be undone: nobody starts it
			}
			t.Run(name+", the next one "+next, func(t *testing.T) {
				base, d := noSystemd(t, daemon.Name, "claim-2")
				other := Daemon{Name: "claim-2", GPUs: []string{"GPU-2"}}
				if err := d.Start(t.Context(), other); err != nil {
					t.Fatal(err)
				}
				tc.before(t, base, d)
				d = inCgroups(d.opts)
				if running, err := d.Running(t.Context(), daemon.Name); running != tc.running || err != nil {
					t.Errorf("running %t, %v: want %t", running, err, tc.running)
				}
				if names, err := d.List(); err != nil || slices.Contains(names, daemon.Name) != tc.listed {
					t.Errorf("there is %q, %v: listed should be %t", names, err, tc.listed)
				}
				if next == "starts it" {
					for range 2 {
						if err := d.Start(t.Context(), daemon); err != nil {
							t.Fatal(err)
						}
					}
					if ready, err := d.Ready(t.Context(), daemon); !ready || err != nil {
						t.Errorf("ready %t, %v", ready, err)
					}
					eventually(t, "it and its server are alone", func() bool { return len(pidsOf(t, d, daemon.Name)) == 3 })
				}
				for range 2 {
					if err := d.Stop(t.Context(), daemon.Name); err != nil {
						t.Fatal(err)
					}
					nothingOf(t, d, daemon.Name)
				}
				if ready, err := d.Ready(t.Context(), other); !ready || err != nil {
					t.Errorf("the other one: ready %t, %v", ready, err)
				}
			})
		}
	}
}

// TestAHelperIsToldNothing: it has the host's root until it is a daemon, and there may be another daemon, to which no limit is said.
func TestAHelperIsToldNothing(t *testing.T) {
	base, d := noSystemd(t, "claim-1")
	told := filepath.Join(base, "told")
	if err := os.WriteFile(filepath.Join(base, "driver", "bin", control), []byte("#!/bin/sh\ncat >> "+told+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	helper := exec.Command("/proc/self/exe", HelperCommand) // it waits to be told what to become
	stdin, err := helper.StdinPipe()
	if err := errors.Join(err, groupOf(t, d, "claim-1").Make(), helper.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stdin.Close(); _ = helper.Wait() })
	joinGroup(t, "claim-1", helper.Process.Pid)
	if running, err := d.Running(t.Context(), "claim-1"); !running || err != nil {
		t.Errorf("running %t, %v: another one would be started beside it", running, err)
	}
	p, err := d.opts.find(control)
	if err == nil {
		err = d.on.tell(t.Context(), p, "claim-1", "get_server_list")
	}
	if err == nil || !strings.Contains(err.Error(), "has not begun") {
		t.Errorf("%v, want that it has not begun", err)
	}
	if _, err := os.Stat(told); !os.IsNotExist(err) {
		t.Errorf("a control program was run: %v", err)
	}
}

// TestADaemonWhoseClientsAreHostile: they have its pipe and its shared memory as root of their containers. Its start writes to no file of the
// host's through what they have left there, and a folder that is full is no reason not to start.
func TestADaemonWhoseClientsAreHostile(t *testing.T) {
	base, d := noSystemd(t, "claim-1", "claim-2")
	precious := filepath.Join(base, "precious")
	if err := os.WriteFile(precious, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"claim-1", "claim-2"} {
		daemon := Daemon{Name: name, GPUs: []string{"GPU-1"}}
		if err := d.makeFolder(name); err != nil {
			t.Fatal(err)
		}
		for _, link := range []string{d.dir(name, logFolder, "output"), d.dir(name, pipeFolder, "control"), d.dir(name, shmFolder, "x")} {
			if err := os.Symlink(precious, link); err != nil {
				t.Fatal(err)
			}
		}
		err := d.Start(t.Context(), daemon)
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "/tmp/nvidia-log/output") {
			t.Errorf("%s: %v, want that its output is a link", name, err)
		}
		if err := os.Remove(d.dir(name, logFolder, "output")); err != nil {
			t.Fatal(err)
		}
		if err := d.Start(t.Context(), daemon); err != nil {
			t.Error(err)
		}
		if text := contents(t, precious); text != "precious" {
			t.Errorf("a file of the host has %q", text)
		}
	}
}

// TestWhereTheAgentCannotStartDaemons: it is told with the reason, before anything is touched.
func TestWhereTheAgentCannotStartDaemons(t *testing.T) {
	tests := map[string]struct {
		change func(t *testing.T, opts *DriverOptions)
		want   string
	}{
		"no cgroups": {want: "there is no cgroup v2 at ROOT/sys/fs/cgroup, and of v1 no controller memory", change: func(*testing.T, *DriverOptions) {}},
		"missing controllers": {want: `cgroup v2 at ROOT/sys/fs/cgroup has no controller pids, only ["cpu" "memory"]`, change: func(t *testing.T, opts *DriverOptions) {
			writeBelow(t, opts.HostRoot, "sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
		}},
		"another PID 1": {want: "PROC/1/root is another folder than --host-root=ROOT: the agent needs hostPID: true", change: func(t *testing.T, opts *DriverOptions) {
			writeBelow(t, opts.HostRoot, "sys/fs/cgroup/cgroup.controllers", "memory pids\n")
			writeBelow(t, opts.ProcRoot, "1/root/x", "")
		}},
		"systemd": {change: func(t *testing.T, opts *DriverOptions) { writeBelow(t, opts.HostRoot, booted+"/x", "") }},
		"cgroups": {change: func(t *testing.T, opts *DriverOptions) {
			writeBelow(t, opts.HostRoot, "sys/fs/cgroup/cgroup.controllers", "memory pids\n")
			if err := errors.Join(os.MkdirAll(filepath.Join(opts.ProcRoot, "1"), 0o755), os.Symlink(opts.HostRoot, filepath.Join(opts.ProcRoot, "1/root"))); err != nil {
				t.Fatal(err)
			}
		}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			opts := DriverOptions{HostRoot: t.TempDir(), ProcRoot: t.TempDir(), MPSRoot: filepath.Join(t.TempDir(), "mps")}
			writeBelow(t, opts.ProcRoot, "meminfo", "MemTotal: 1024 kB\n")
			writeBelow(t, opts.ProcRoot, "sys/kernel/pid_max", "1000\n")
			writeBelow(t, opts.ProcRoot, "sys/kernel/threads-max", "1000\n")
			tc.change(t, &opts)
			how, err := CheckHost(opts)
			want := strings.NewReplacer("ROOT", opts.HostRoot, "PROC", opts.ProcRoot).Replace(tc.want)
			switch {
			case want == "" && (err != nil || how == ""):
				t.Errorf("how %q, %v", how, err)
			case want != "" && (err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "/run/systemd/system")):
				t.Errorf("%v, want an error with %q", err, want)
			}
			if errors.Is(err, confine.ErrMissing) {
				// What an earlier agent has left there can be taken away.
				d := inCgroups(opts)
				names, err := d.List()
				running, err2 := d.Running(t.Context(), "claim-1")
				if err := errors.Join(err, err2, d.Stop(t.Context(), "claim-1")); err != nil || len(names) > 0 || running {
					t.Errorf("there is %q, running %t, %v", names, running, err)
				}
			}
			if _, isSystemd := NewDriver(opts).Daemons.(*daemons).on.(*systemd); isSystemd != (name == "systemd") {
				t.Errorf("systemd starts daemons: %t", isSystemd)
			}
		})
	}
}

func writeBelow(t *testing.T, root, file, text string) {
	t.Helper()
	path := filepath.Join(root, file)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}

// TestWhatADaemonSaysThatDoesNotStart is found, and nothing of it is left but its folder.
func TestWhatADaemonSaysThatDoesNotStart(t *testing.T) {
	base, d := noSystemd(t, "claim-1", "claim-2")
	writeBelow(t, base, "broken", "")
	for _, name := range []string{"claim-1", "claim-2"} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := d.Start(ctx, Daemon{Name: name, GPUs: []string{"GPU-1"}})
		if err == nil || !strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "it has ended, or has not begun: what it said is in "+d.dir(name, logFolder)) {
			t.Errorf("%v, want where it is said", err)
		}
		if said := contents(t, d.dir(name, logFolder, "output")); said != "no device was found\n" {
			t.Errorf("it said %q", said)
		}
	}
}

func TestFoldersThatADaemonDoesNotSee(t *testing.T) {
	for name, tc := range map[string]struct {
		p    program
		want []string
	}{
		"the host's driver":    {p: program{path: control}, want: []string{"/home", "/root", "/run", "/var/mps"}},
		"a driver's root":      {p: program{path: "/usr/bin/" + control, root: "/run/nvidia/driver"}, want: []string{"/home", "/root", "/run", "/var/mps"}},
		"a driver below /home": {p: program{path: "/home/kubernetes/bin/nvidia/bin/" + control}, want: []string{"/root", "/run", "/var/mps"}},
		"libraries below /run": {p: program{path: control, env: []string{"LD_LIBRARY_PATH=/lib:/run/driver/lib"}}, want: []string{"/home", "/root", "/var/mps"}},
		"a name that begins so": {
			p: program{path: "/homes/bin/" + control, env: []string{"PATH=/runtime/bin"}}, want: []string{"/home", "/root", "/run", "/var/mps"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &cgroups{folders{DriverOptions{MPSRoot: "/var/mps"}}}
			if got := c.hidden(tc.p); !slices.Equal(got, tc.want) {
				t.Errorf("hidden are %q, want %q", got, tc.want)
			}
		})
	}
}

func TestTheDriversDevices(t *testing.T) {
	proc := t.TempDir()
	writeBelow(t, proc, "devices", "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n508 nvidia-uvm\n  9 xnvidia\n\nBlock devices:\n  7 nvidia-disk\n")
	if got, err := driverMajors(proc); err != nil || !slices.Equal(got, []uint32{195, 195, 508}) {
		t.Errorf("majors %v, %v", got, err)
	}
}
