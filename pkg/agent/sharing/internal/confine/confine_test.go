// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package confine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

// testParent keeps the tests' cgroups apart from an agent's.
const testParent = "stowage-confine-test"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == Command {
		fmt.Fprintln(os.Stderr, Become(os.Stdin))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// kinds of cgroups that this machine has: v1 with these limits, and v2, which has no controllers where v1 has them.
func kinds(t *testing.T, limits ...Limit) map[string]*Cgroups {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	all := map[string]*Cgroups{}
	add := func(name, path string, limits []Limit) {
		c, err := Find(path, limits)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Writable(); err != nil {
			t.Skipf("cgroups cannot be made here: %v", err)
		}
		c.parent = testParent
		all[name] = c
		t.Cleanup(func() {
			for _, hierarchy := range c.own {
				if err := unix.Rmdir(filepath.Join(hierarchy, testParent)); err != nil && !errors.Is(err, unix.ENOENT) {
					t.Errorf("what is left in %s: %v", hierarchy, err)
				}
			}
		})
	}
	const machine = "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(machine, "memory", procsFile)); err != nil {
		add("v2", machine, limits)
		return all
	}
	add("v1", machine, append(limits, Limit{Controller: "memory"}, Limit{Controller: "pids"}))
	unified := t.TempDir()
	if err := unix.Mount("cgroup2", unified, "cgroup2", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(unified, 0); err != nil {
			t.Error(err)
		}
	})
	add("v2", unified, nil)
	return all
}

// shell is a program that runs a script. What it says is in the file output of the folder, which it has as /tmp/own.
func shell(folder, script string) Program {
	return Program{
		Paths: []string{"/nowhere/sh", "/bin/sh"}, Args: []string{"sh", "-c", script}, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"},
		Binds: []Bind{{folder, "/tmp/own"}}, Output: "/tmp/own/output", Capabilities: []uintptr{unix.CAP_CHOWN, unix.CAP_KILL},
	}
}

// end ends what a test has started, whatever came of it.
func end(t *testing.T, groups ...*Group) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		for _, g := range groups {
			if err := g.End(ctx, 0); err != nil {
				t.Error(err)
			}
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	if err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, time.Minute, true, func(context.Context) (bool, error) { return is(), nil }); err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

func processes(t *testing.T, g *Group) []int {
	t.Helper()
	pids, err := g.Processes()
	if err != nil {
		t.Fatal(err)
	}
	return pids
}

func gone(t *testing.T, g *Group) {
	t.Helper()
	for _, dir := range g.dirs() {
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", dir, err)
		}
	}
}

// inPod puts this test into a cgroup of the hierarchy, as an agent is in its pod's. One that takes no processes as it is, as of
// cpuset, is left out.
func inPod(t *testing.T, hierarchy string) {
	t.Helper()
	pod := filepath.Join(hierarchy, testParent+"-pod")
	if err := os.Mkdir(pod, 0o755); err != nil {
		t.Fatal(err)
	}
	entered := write(filepath.Join(pod, procsFile), "0")
	t.Cleanup(func() {
		if entered == nil {
			if err := write(filepath.Join(hierarchy, procsFile), "0"); err != nil {
				t.Error(err)
			}
		}
		if err := unix.Rmdir(pod); err != nil {
			t.Error(err)
		}
	})
	if entered != nil && !errors.Is(entered, unix.ENOSPC) {
		t.Fatal(entered)
	}
}

// TestAProgramHasACgroupOfItsOwn, and is in none of its parent's: what ends the agent's pod does not end it.
func TestAProgramHasACgroupOfItsOwn(t *testing.T) {
	for kind, c := range kinds(t) {
		t.Run(kind, func(t *testing.T) {
			one, two := c.Group("one"), c.Group("two")
			end(t, one, two)
			for _, hierarchy := range c.others {
				inPod(t, hierarchy)
			}
			for range 2 { // it is there already
				for _, g := range []*Group{one, two} {
					if err := g.Make(); err != nil {
						t.Fatal(err)
					}
				}
			}
			for _, g := range []*Group{one, two} {
				if err := g.Start(t.Context(), "", shell(t.TempDir(), "sleep 1000 & wait")); err != nil {
					t.Fatal(err)
				}
			}
			if names, err := c.Names(); err != nil || !slices.Equal(names, []string{"one", "two"}) {
				t.Errorf("names %q, %v", names, err)
			}
			until(t, "both have a child", func() bool { return len(processes(t, one)) == 2 && len(processes(t, two)) == 2 })
			pid := processes(t, one)[0]
			if sid, err := unix.Getsid(pid); err != nil || sid != pid {
				t.Errorf("process %d is in session %d, %v: want one of its own", pid, sid, err)
			}
			cgroups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
			if err != nil {
				t.Fatal(err)
			}
			for line := range strings.Lines(string(cgroups)) {
				if path := strings.SplitN(strings.TrimSpace(line), ":", 3)[2]; kind == "v1" && path != "/" && path != "/"+testParent+"/one" {
					t.Errorf("it is in a cgroup of its parent's: %s", line)
				}
			}
			if !strings.Contains(string(cgroups), "/"+testParent+"/one\n") {
				t.Errorf("it is in %s", cgroups)
			}
			for range 2 { // the second time there is nothing
				if err := one.End(t.Context(), time.Minute); err != nil {
					t.Fatal(err)
				}
			}
			gone(t, one)
			if left := processes(t, two); len(left) != 2 {
				t.Errorf("the other one's processes: %v", left)
			}
		})
	}
}

// TestWhatDoesNotEndIsKilled: processes that take no notice of SIGTERM, and come and go all the time.
func TestWhatDoesNotEndIsKilled(t *testing.T) {
	for kind, c := range kinds(t) {
		t.Run(kind, func(t *testing.T) {
			busy, other := c.Group("busy"), c.Group("other")
			end(t, busy, other)
			const script = "trap '' TERM; for i in 1 2 3 4 5 6 7 8; do (while :; do /bin/true; done) & done; wait"
			for g, script := range map[*Group]string{busy: script, other: "trap '' TERM; exec sleep 1000"} {
				if err := errors.Join(g.Make(), g.Start(t.Context(), "", shell(t.TempDir(), script))); err != nil {
					t.Fatal(err)
				}
			}
			until(t, "it has children", func() bool { return len(processes(t, busy)) > 8 })
			until(t, "the other one takes no notice either", func() bool {
				comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", processes(t, other)[0]))
				return err == nil && string(comm) == "sleep\n"
			})
			if err := busy.End(t.Context(), 100*time.Millisecond); err != nil {
				t.Fatal(err)
			}
			gone(t, busy)
			if len(processes(t, other)) != 1 {
				t.Error("the other one has ended, too")
			}
			// Its time may be up before.
			over, cancel := context.WithCancel(t.Context())
			cancel()
			if err := other.End(over, time.Minute); err == nil {
				t.Error("nothing is waited for, and it is no error")
			}
		})
	}
}

// TestLimitsOfACgroup hold for what its program starts, and for nobody else.
func TestLimitsOfACgroup(t *testing.T) {
	const tasks = 40
	limits := []Limit{
		{Controller: "memory", V1: "memory.limit_in_bytes", V2: "memory.max", Value: strconv.Itoa(32 << 20)},
		{Controller: "memory", V2: "memory.oom.group", Value: "1"},
		{Controller: "pids", V1: "pids.max", V2: "pids.max", Value: strconv.Itoa(tasks)},
	}
	for kind, c := range kinds(t, limits...) {
		if len(c.limits) == 0 {
			continue // of the two kinds the other has the controllers
		}
		t.Run(kind, func(t *testing.T) {
			bomb, glutton, other := c.Group("bomb"), c.Group("glutton"), c.Group("other")
			end(t, bomb, glutton, other)
			for g, script := range map[*Group]string{
				bomb:    "exec bash -c 'trap \"\" TERM; f() { while :; do f & done; }; f'", // goes on where it gets no process
				glutton: "exec tail -c 1g /dev/zero",
				other:   "exec sleep 1000",
			} {
				if err := errors.Join(g.Make(), g.Start(t.Context(), "", shell(t.TempDir(), script))); err != nil {
					t.Fatal(err)
				}
			}
			until(t, "the fork bomb is at its limit", func() bool { return len(processes(t, bomb)) >= tasks-5 })
			for range 20 {
				if n := len(processes(t, bomb)); n > tasks {
					t.Fatalf("%d processes, want at most %d", n, tasks)
				}
			}
			until(t, "the glutton is ended", func() bool { return len(processes(t, glutton)) == 0 })
			if err := bomb.End(t.Context(), 100*time.Millisecond); err != nil {
				t.Fatal(err)
			}
			gone(t, bomb)
			if len(processes(t, other)) != 1 {
				t.Error("the other one has ended, too")
			}
		})
	}
}

// TestWhatAProgramMayDo: each script says yes without the sandbox, and no in it.
func TestWhatAProgramMayDo(t *testing.T) {
	secret := filepath.Join("/var/tmp", "stowage-confine-test")
	tests := map[string]string{
		"write to files of the host":   "echo x > " + secret + "/written",
		"write to the kernel":          "echo 0 > /proc/self/oom_score_adj",
		"see a folder that is hidden":  "[ -e " + secret + "/hidden/file ]",
		"see other devices":            "[ -e /dev/tty ]",
		"make a device":                "mknod /tmp/own/node c 1 3",
		"make one in its /dev":         "mknod /dev/stowage-confine-test c 1 3 && rm /dev/stowage-confine-test",
		"mount":                        "mount -t tmpfs tmpfs /mnt",
		"make a namespace":             "unshare --user true",
		"enter one":                    "nsenter --net=/proc/self/ns/net true",
		"connect to the network":       "bash -c 'exec 3<>/dev/udp/127.0.0.1/9'",
		"change how programs are laid": "setarch -R true",
		"get new privileges":           "! grep -q 'NoNewPrivs:.1' /proc/self/status",
		"call without a filter":        "! grep -q 'Seccomp:.2' /proc/self/status",
		"use other capabilities":       "! grep -q 'CapEff:.0000000000000021' /proc/self/status",
		"get other capabilities":       "! grep -q 'CapBnd:.0000000000000021' /proc/self/status",
	}
	if err := os.MkdirAll(filepath.Join(secret, "hidden"), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(secret) })
	if err := os.WriteFile(filepath.Join(secret, "hidden", "file"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for kind, c := range kinds(t) {
		for _, unconfined := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, unconfined=%t", kind, unconfined), func(t *testing.T) {
				g, folder := c.Group("rights"), t.TempDir()
				end(t, g)
				var script strings.Builder
				for what, does := range tests {
					fmt.Fprintf(&script, "if (%s); then echo 'yes: %s'; else echo 'no: %s'; fi\n", does, what, what)
				}
				script.WriteString("echo said > /dev/null && echo x > /dev/shm/x && echo x > /tmp/x && echo 'its own: all'\n")
				p := shell(folder, script.String())
				shm := t.TempDir()
				p.Binds = append(p.Binds, Bind{shm, "/dev/shm"})
				p.Hide, p.Unconfined = []string{"/nowhere", filepath.Join(secret, "hidden")}, unconfined
				if err := errors.Join(g.Make(), g.Start(t.Context(), "", p)); err != nil {
					t.Fatal(err)
				}
				until(t, "it has ended", func() bool { return len(processes(t, g)) == 0 })
				data, err := os.ReadFile(filepath.Join(folder, "output"))
				if err != nil {
					t.Fatal(err)
				}
				said := strings.Split(string(data), "\n")
				answer := map[bool]string{true: "yes: ", false: "no: "}[unconfined]
				for what := range tests {
					if !slices.Contains(said, answer+what) {
						t.Errorf("want %q", answer+what)
					}
				}
				if !slices.Contains(said, "its own: all") {
					t.Error("it cannot do what is its own")
				}
				if _, err := os.Stat(filepath.Join(shm, "x")); err != nil {
					t.Error(err)
				}
				if t.Failed() {
					t.Logf("it said:\n%s", data)
				}
			})
		}
	}
}

// TestDevicesOfAProgram are those of the kinds it was given, with their modes, and the devices that any program has.
func TestDevicesOfAProgram(t *testing.T) {
	for kind, c := range kinds(t) {
		t.Run(kind, func(t *testing.T) {
			g, folder := c.Group("devices"), t.TempDir()
			end(t, g)
			var stat unix.Stat_t
			if err := unix.Stat("/dev/tty", &stat); err != nil {
				t.Fatal(err)
			}
			p := shell(folder, "ls /dev; stat -c 'tty is %t:%T %a' /dev/tty")
			p.Majors = []uint32{unix.Major(uint64(stat.Rdev))}
			if err := errors.Join(g.Make(), g.Start(t.Context(), "", p)); err != nil {
				t.Fatal(err)
			}
			until(t, "it has ended", func() bool { return len(processes(t, g)) == 0 })
			data, err := os.ReadFile(filepath.Join(folder, "output"))
			if err != nil {
				t.Fatal(err)
			}
			said := strings.Split(strings.TrimSpace(string(data)), "\n")
			for _, want := range append(slices.Clone(memory), "tty", "console", fmt.Sprintf("tty is %x:%x %o", unix.Major(uint64(stat.Rdev)), unix.Minor(uint64(stat.Rdev)), stat.Mode&0o777)) {
				if !slices.Contains(said, want) {
					t.Errorf("it has no %q: %q", want, said)
				}
			}
			for _, no := range []string{"mem", "kmsg", "fuse", "ptmx"} {
				if no != "ptmx" && slices.Contains(said, no) {
					t.Errorf("it has %s", no)
				}
			}
		})
	}
}

// TestAProgramInAnotherRoot sees that root alone, and its folders there. Nothing is made in the root.
func TestAProgramInAnotherRoot(t *testing.T) {
	for kind, c := range kinds(t) {
		t.Run(kind, func(t *testing.T) {
			g, folder, root := c.Group("root"), t.TempDir(), t.TempDir()
			end(t, g)
			for _, dir := range []string{"usr", "dev", "tmp", "proc"} {
				if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			for _, bind := range []string{"usr", "proc"} {
				path := filepath.Join(root, bind)
				if err := unix.Mount("/"+bind, path, "", unix.MS_BIND, ""); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
						t.Error(err)
					}
				})
			}
			for _, link := range []string{"bin", "lib", "lib64"} {
				if err := os.Symlink("usr/"+link, filepath.Join(root, link)); err != nil {
					t.Fatal(err)
				}
			}
			p := shell(folder, "ls /")
			p.Root = root
			if err := errors.Join(g.Make(), g.Start(t.Context(), "", p)); err != nil {
				t.Fatal(err)
			}
			until(t, "it has ended", func() bool { return len(processes(t, g)) == 0 })
			data, err := os.ReadFile(filepath.Join(folder, "output"))
			if got, want := strings.Fields(string(data)), []string{"bin", "dev", "lib", "lib64", "proc", "tmp", "usr"}; err != nil || !slices.Equal(got, want) {
				t.Errorf("it sees %q, %v: want %q", got, err, want)
			}
			for _, dir := range []string{"dev", "tmp"} {
				if left, err := os.ReadDir(filepath.Join(root, dir)); err != nil || len(left) > 0 {
					t.Errorf("%s of its root has %v, %v", dir, left, err)
				}
			}
		})
	}
}

// TestTheNamespacesOfTheHost: the program has those of the process named, and not the agent's.
func TestTheNamespacesOfTheHost(t *testing.T) {
	for kind, c := range kinds(t) {
		t.Run(kind, func(t *testing.T) {
			host, g := c.Group("host"), c.Group("guest")
			folder, err := os.MkdirTemp("/var/tmp", "stowage-confine-test-") // the host has a /tmp of its own
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(folder) })
			end(t, host, g)
			// A process with namespaces of its own stands for the host's first one.
			p := shell(t.TempDir(), "exec unshare --net --ipc --uts --cgroup sh -c 'hostname the-host; exec sleep 1000'")
			p.Unconfined = true
			if err := errors.Join(host.Make(), host.Start(t.Context(), "", p)); err != nil {
				t.Fatal(err)
			}
			var pid int
			until(t, "it is there", func() bool {
				pids := processes(t, host)
				if len(pids) != 1 {
					return false
				}
				pid = pids[0]
				comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
				return err == nil && string(comm) == "sleep\n"
			})
			proc := fmt.Sprint("/proc/", pid)
			if err := errors.Join(g.Make(), g.Start(t.Context(), proc, shell(folder, "hostname; sleep 1000"))); err != nil {
				t.Fatal(err)
			}
			guest := processes(t, g)[0]
			for _, ns := range []string{"net", "ipc", "uts", "cgroup"} {
				theirs, err := os.Readlink(filepath.Join(proc, "ns", ns))
				ours, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", guest, ns))
				if err := errors.Join(err, err2); err != nil || theirs != ours {
					t.Errorf("namespace %s: %s, the host has %s: %v", ns, ours, theirs, err)
				}
			}
			until(t, "it says the name of the host", func() bool {
				said, err := os.ReadFile(filepath.Join(folder, "output"))
				return err == nil && string(said) == "the-host\n"
			})
		})
	}
}

// TestFailuresOfAHelper name what is missing, and leave no process.
func TestFailuresOfAHelper(t *testing.T) {
	tests := map[string]struct {
		change func(p *Program)
		host   string
		want   string
	}{
		"no program":     {change: func(p *Program) { p.Paths = []string{"/nowhere/a", "/nowhere/b"} }, want: `run ["/nowhere/a" "/nowhere/b"] in root ""`},
		"not executable": {change: func(p *Program) { p.Paths = []string{"/etc/passwd"} }, want: "run /etc/passwd: permission denied"},
		"no root":        {change: func(p *Program) { p.Root = "/nowhere" }, want: "chroot /nowhere: no such file"},
		"no folder":      {change: func(p *Program) { p.Binds[0].From = "/nowhere" }, want: "open /nowhere: no such file"},
		"a target that cannot be made": {
			change: func(p *Program) { p.Binds[0].To = "/usr/stowage" }, want: "mkdir /usr/stowage: read-only file system",
		},
		"no host": {change: func(*Program) {}, host: "/proc/0", want: "namespace /proc/0/ns/cgroup"},
		"a pipe that nobody reads in the place of its output": {
			change: func(p *Program) { must(t, unix.Mkfifo(filepath.Join(p.Binds[0].From, "output"), 0o600)) },
			want:   "open /tmp/own/output: no such device or address",
		},
	}
	for kind, c := range kinds(t) {
		for name, tc := range tests {
			t.Run(kind+", "+name, func(t *testing.T) {
				g, p := c.Group("failing"), shell(t.TempDir(), "sleep 1000")
				end(t, g)
				tc.change(&p)
				if err := g.Make(); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				if err := g.Start(ctx, tc.host, p); err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("%v, want an error with %q", err, tc.want)
				}
				until(t, "no process is left", func() bool { return len(processes(t, g)) == 0 })
			})
		}
		t.Run(kind+", no cgroup", func(t *testing.T) {
			g, p := c.Group("missing"), shell(t.TempDir(), "sleep 1000")
			if err := g.Start(t.Context(), "", p); err == nil || !strings.Contains(err.Error(), "/missing") {
				t.Errorf("%v, want that its devices could not be restricted", err)
			}
			p.Unconfined = true
			if err := g.Start(t.Context(), "", p); err == nil || !strings.Contains(err.Error(), "enter cgroup: ") {
				t.Errorf("%v, want that it could not enter its cgroup", err)
			}
		})
	}
}

// TestAnAgentThatEndsBeforeItHasSaidWhatToRun leaves a helper that ends, too.
func TestAnAgentThatEndsBeforeItHasSaidWhatToRun(t *testing.T) {
	for _, told := range []string{"", `{"Paths":["/bin/sh"],"Doo`} {
		if err := become(strings.NewReader(told)); err == nil || !strings.Contains(err.Error(), "the agent has ended") {
			t.Errorf("told %q: %v", told, err)
		}
	}
}

// TestCgroupsThatDoNotDo are told with the place and what is missing.
func TestCgroupsThatDoNotDo(t *testing.T) {
	limits := []Limit{{Controller: "memory"}, {Controller: "pids"}, {Controller: "memory"}}
	tests := map[string]struct {
		files map[string]string
		want  string
	}{
		"nothing":         {want: "there is no cgroup v2 at DIR, and of v1 no controller memory"},
		"v1 without pids": {files: map[string]string{"memory/cgroup.procs": "", "cpu/cgroup.procs": ""}, want: "and of v1 no controller pids"},
		"v1 without devices": {
			files: map[string]string{"memory/cgroup.procs": "", "pids/cgroup.procs": "", "cpu/cgroup.procs": ""}, want: "and of v1 no controller devices",
		},
		"v2 without pids": {files: map[string]string{"cgroup.controllers": "cpu memory hugetlb\n"}, want: `cgroup v2 at DIR has no controller pids, only ["cpu" "memory" "hugetlb"]`},
		"v2 with all":     {files: map[string]string{"cgroup.controllers": "cpu memory pids\n"}},
		"v1 with all": {files: map[string]string{
			"memory/cgroup.procs": "", "pids/cgroup.procs": "", "devices/cgroup.procs": "", "cpu/cgroup.procs": "",
		}},
		"the names differ": {files: map[string]string{"cgroup.controllers": "memory2 pids\n"}, want: "has no controller memory"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for file, text := range tc.files {
				path := filepath.Join(dir, file)
				if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
					t.Fatal(err)
				}
			}
			c, err := Find(dir, limits)
			want := strings.ReplaceAll(tc.want, "DIR", dir)
			if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Fatalf("%v, want %q", err, want)
			}
			if err == nil && !c.v2 && !slices.Equal(c.others, []string{filepath.Join(dir, "cpu")}) {
				t.Errorf("the others are %q", c.others)
			}
		})
	}
}
