// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// daemon is one of MPS, started by hand: on a machine with systemd checkMPSSandbox starts it as the agent does.
type daemon struct {
	folder string
	cmd    *exec.Cmd
}

func startDaemon(t *testing.T, uuid string, options ...string) *daemon {
	t.Helper()
	d := &daemon{folder: tmpfs(t)}
	for folder, mode := range map[string]os.FileMode{"pipe": 0o755, "log": 0o755, "shm": 0o777 | os.ModeSticky} {
		path := filepath.Join(d.folder, folder)
		if err := os.Mkdir(path, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	const script = `mount --bind "$0" /dev/shm && exec nvidia-cuda-mps-control -f "$@"`
	d.cmd = exec.Command("unshare", append([]string{"--mount", "--propagation", "private", "sh", "-c", script, filepath.Join(d.folder, "shm")}, options...)...)
	d.cmd.Env = append(os.Environ(), "CUDA_VISIBLE_DEVICES="+uuid, "CUDA_MPS_PIPE_DIRECTORY="+d.pipe(), "CUDA_MPS_LOG_DIRECTORY="+filepath.Join(d.folder, "log"))
	var said strings.Builder
	d.cmd.Stdout, d.cmd.Stderr = &said, &said
	d.cmd.WaitDelay = 20 * time.Second // a server that has left its group may hold them
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	sweep(t, `kill -s KILL -- "-$1" 2>&- || true`, strconv.Itoa(d.cmd.Process.Pid)) // after "quit" the group is empty
	t.Cleanup(func() {
		if out, err := d.tell("quit -t 5"); err != nil {
			t.Logf("quit: %v: %s", err, out)
		}
		done := make(chan error, 1)
		go func() { done <- d.cmd.Wait() }()
		select {
		case <-done:
		case <-time.After(15 * time.Second):
			t.Error("the daemon did not end within 15 s of quit")
			_ = syscall.Kill(-d.cmd.Process.Pid, syscall.SIGKILL)
			<-done
		}
		for _, name := range []string{"control.log", "server.log"} {
			if text, err := os.ReadFile(filepath.Join(d.folder, "log", name)); err == nil {
				t.Logf("%s:\n%s", name, text)
			}
		}
		if said.Len() > 0 {
			t.Logf("it said: %s", said.String())
		}
	})
	waitFor(t, "the daemon takes commands", 10*time.Second, func() bool {
		_, err := d.tell("get_server_list")
		return err == nil
	})
	return d
}

func (d *daemon) pipe() string { return filepath.Join(d.folder, "pipe") }

// tell gives the daemon a command, for which it has 10 s.
func (d *daemon) tell(command string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nvidia-cuda-mps-control")
	cmd.WaitDelay = time.Second
	cmd.Env = append(os.Environ(), "CUDA_MPS_PIPE_DIRECTORY="+d.pipe())
	cmd.Stdin = strings.NewReader(command + "\n")
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// servers are the PIDs that the daemon names.
func (d *daemon) servers(t *testing.T) (pids []int) {
	t.Helper()
	out, err := d.tell("get_server_list")
	if err != nil {
		t.Errorf("get_server_list: %v: %s", err, out)
	}
	for _, field := range strings.Fields(out) {
		if pid, err := strconv.Atoi(field); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// edits are what the agent gives a container for a share of the daemon's GPU.
func (d *daemon) edits(memoryMiB, percent int) *cdispecs.ContainerEdits {
	bind := []string{"rw", "nosuid", "nodev", "noexec", "bind"}
	return &cdispecs.ContainerEdits{
		Env: []string{"CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps", fmt.Sprintf("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=%dM", memoryMiB), fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", percent)},
		Mounts: []*cdispecs.Mount{
			{HostPath: d.pipe(), ContainerPath: "/tmp/nvidia-mps", Options: bind},
			{HostPath: filepath.Join(d.folder, "shm"), ContainerPath: "/dev/shm", Options: bind},
		},
	}
}

// mpsClients starts clients of a daemon, in containers.
type mpsClients struct {
	t    *testing.T
	d    *daemon
	spec *cdispecs.Spec
}

func (m *mpsClients) start(name string, uid uint32, memoryMiB, percent int) contained {
	m.t.Helper()
	c := startContainer(m.t, container{uid: uid, edits: []*cdispecs.ContainerEdits{&m.spec.ContainerEdits, &m.spec.Devices[0].ContainerEdits, m.d.edits(memoryMiB, percent)}})
	c.name = name
	return c
}

// checkMPSClients: containers share a GPU under a daemon as the agent has them do.
func checkMPSClients(t *testing.T, n node, lib nvml.Library, found *discovery.Node) {
	for _, program := range []string{runc, hook, "nvidia-cuda-mps-control", "unshare"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("not run: %s is not in PATH", program)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("not run: needs root")
	}
	gpu := found.GPUs[0]
	device := firstGPU(t, lib, found)
	if mode, err := device.ComputeMode(); err != nil || mode == nvml.ComputeProhibited {
		t.Skipf("not run: compute mode %s, %v", mode, err)
	}
	spec := claimSpec(t, n, gpu)
	t.Run("limits", func(t *testing.T) { checkMPSLimits(t, device, &mpsClients{t, startDaemon(t, gpu.UUID), spec}) })
	t.Run("a client's fault", func(t *testing.T) { checkMPSFault(t, &mpsClients{t, startDaemon(t, gpu.UUID), spec}) })
	t.Run("several users", func(t *testing.T) {
		checkMPSUsers(t, &mpsClients{t, startDaemon(t, gpu.UUID, "--multiuser-server"), spec})
	})
	t.Run("one user after the other", func(t *testing.T) { checkMPSNextUser(t, &mpsClients{t, startDaemon(t, gpu.UUID), spec}) })
}

// checkMPSLimits: each client is held to its own memory and processors by its environment, and NVML lists clients and server, the latter in the
// daemon's cgroup, from the first client on. Killing one client leaves the other alone.
func checkMPSLimits(t *testing.T, device nvml.Device, m *mpsClients) {
	whole := localClient(t, "without MPS")
	whole.must("open")
	all := number(t, whole.must("processors"))
	whole.kill()
	if servers := m.d.servers(t); len(servers) > 0 {
		t.Errorf("servers before the first client: %v", servers)
	}
	one := m.start("one", 65534, 4096, 25)
	one.must("open")
	one.must("compute")
	servers := m.d.servers(t)
	if len(servers) != 1 {
		t.Fatalf("%v are the daemon's servers, want one", servers)
	}
	if has := number(t, one.must("processors")); has >= all/2 {
		t.Errorf("a client of a quarter of the GPU has %d of %d multiprocessors", has, all)
	}
	one.must("memory")
	one.must("alloc 2048")
	if _, err := one.ask("alloc 4096"); err == nil || !strings.Contains(err.Error(), "CUDA_ERROR_OUT_OF_MEMORY") {
		t.Errorf("a client of a share of 4096 MiB takes 6144: %v", err)
	}
	two := m.start("two", 65534, 8192, 75)
	two.must("open")
	two.must("alloc 6144")
	two.must("compute")
	if has := number(t, two.must("processors")); has <= all/2 || has > all*3/4+2 {
		t.Errorf("a client of three quarters of the GPU has %d of %d multiprocessors", has, all)
	}
	for _, pid := range []int{one.pid(), two.pid(), servers[0]} {
		if p, ok := listed(t, device, pid); !ok {
			t.Errorf("process %d is not listed", pid)
		} else {
			t.Logf("%+v", p)
		}
	}
	if daemons, servers := cgroup(t, m.d.cmd.Process.Pid), cgroup(t, servers[0]); daemons != servers {
		t.Errorf("the server is in cgroup %s, the daemon in %s", servers, daemons)
	}
	one.kill()
	two.must("compute")
}

// checkMPSFault: a client that faults ends those beside it, and while any of them is there nobody else is served. The next one is, once they are gone.
func checkMPSFault(t *testing.T, m *mpsClients) {
	one, two := m.start("one", 65534, 4096, 25), m.start("two", 65534, 4096, 25)
	for _, c := range []contained{one, two} {
		c.must("open")
		c.must("compute")
	}
	if _, err := one.ask("fault"); err == nil {
		t.Error("writing to no memory is no fault under MPS")
	}
	if _, err := two.ask("compute"); err == nil {
		t.Error("a client's fault leaves its sibling alone: the documents say that it does not")
	}
	beside := m.start("beside them", 65534, 4096, 25)
	if _, err := beside.ask("open"); err == nil || !strings.Contains(err.Error(), "CUDA_ERROR_MPS_SERVER_NOT_READY") {
		t.Errorf("a client beside those that the fault has ended: %v", err)
	}
	for _, c := range []contained{one, two, beside} {
		c.kill()
	}
	// The daemon may find out a moment later that they are gone.
	waitFor(t, "the next client is served", 20*time.Second, func() (served bool) {
		t.Run("the next", func(t *testing.T) { // each try's container is removed before the next one's is made
			next := (&mpsClients{t, m.d, m.spec}).start("the next", 65534, 4096, 25)
			_, err := next.ask("open")
			if err == nil {
				_, err = next.ask("compute")
			}
			next.kill()
			served = err == nil
		})
		return served
	})
}

// checkMPSUsers: with one server for all, two users have clients at a time.
func checkMPSUsers(t *testing.T, m *mpsClients) {
	one, two := m.start("user 1000", 1000, 4096, 25), m.start("user 2000", 2000, 4096, 25)
	one.must("open")
	two.must("open")
	one.must("compute")
	two.must("compute")
	if servers := m.d.servers(t); len(servers) != 1 {
		t.Errorf("%v are the daemon's servers, want one", servers)
	}
}

// checkMPSNextUser: without that, a second user waits until the first has no client any more.
func checkMPSNextUser(t *testing.T, m *mpsClients) {
	one := m.start("user 1000", 1000, 4096, 25)
	one.must("open")
	two := m.start("user 2000", 2000, 4096, 25)
	answer := make(chan string, 1)
	if _, err := fmt.Fprintln(two.in, "open"); err != nil {
		t.Fatal(err)
	}
	go func() {
		two.out.Scan()
		answer <- two.out.Text()
	}()
	select {
	case text := <-answer:
		t.Logf("a second user beside the first: %s", text)
		return
	case <-time.After(5 * time.Second):
		t.Log("a second user beside the first waits")
	}
	one.kill()
	select {
	case text := <-answer:
		if !strings.HasPrefix(text, "ok") {
			t.Errorf("a second user after the first: %s", text)
		}
	case <-time.After(20 * time.Second):
		t.Error("a second user after the first is not served within 20 s")
	}
}

func number(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Errorf("%q is no number", text)
	}
	return n
}

func cgroup(t *testing.T, pid int) string {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Error(err)
	}
	return string(data)
}
