// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hostcheck

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"stowage.dev/stowage/pkg/agent/cdi"
)

// machine is a host in a folder.
type machine struct {
	*testing.T
	host Host
}

func newMachine(t *testing.T) *machine {
	root, err := os.MkdirTemp("", "host") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	return &machine{t, Host{
		Root: root, Proc: filepath.Join(root, "proc"), DriverRoot: root, KubeletRoot: "/kubelet", CDIDir: "/var/run/cdi", Runtime: Auto,
		ToolkitConfig: cdi.AutoToolkitConfig,
	}}
}

func (m *machine) file(path, content string) string {
	m.Helper()
	path = m.host.path(path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		m.Fatal(err)
	}
	return path
}

// library is an ELF file, as a driver has it.
func (m *machine) library(version string) {
	m.Helper()
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		m.Fatal(err)
	}
	file := m.file("/usr/lib64/libnvidia-ml.so."+version, string(program))
	if err := os.Symlink(filepath.Base(file), filepath.Join(filepath.Dir(file), "libnvidia-ml.so.1")); err != nil {
		m.Fatal(err)
	}
}

func (m *machine) socket(path string) net.Listener {
	m.Helper()
	path = m.host.path(path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		m.Fatal(err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		m.Fatal(err)
	}
	m.Cleanup(func() { _ = listener.Close() })
	return listener
}

// runtime is a container runtime that says that of itself.
type containerRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	name, version, config string
}

func (r *containerRuntime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{RuntimeName: r.name, RuntimeVersion: r.version}, nil
}

func (r *containerRuntime) Status(_ context.Context, request *runtimeapi.StatusRequest) (*runtimeapi.StatusResponse, error) {
	info := map[string]string{}
	if request.GetVerbose() {
		info["config"] = r.config
	}
	return &runtimeapi.StatusResponse{Info: info}, nil
}

func (m *machine) containerRuntime(path, name, config string) {
	m.serve(path, &containerRuntime{name: name, version: "v1", config: config})
}

// serve answers by the CRI, unless runtime is nil.
func (m *machine) serve(path string, runtime *containerRuntime) {
	server := grpc.NewServer()
	if runtime != nil {
		runtimeapi.RegisterRuntimeServiceServer(server, runtime)
	}
	listener := m.socket(path)
	go func() { _ = server.Serve(listener) }()
	m.Cleanup(server.Stop)
}

// tasks is what a daemon's limits are parts of.
func (m *machine) tasks() {
	m.file("/proc/meminfo", "MemTotal:  1024 kB\n")
	m.file("/proc/sys/kernel/pid_max", "1000\n")
	m.file("/proc/sys/kernel/threads-max", "1000\n")
}

func (m *machine) process(pid, command string) { m.file("/proc/"+pid+"/comm", command+"\n") }

const containerdSocket = "/run/containerd/containerd.sock"

// well is a host that has everything.
func well(m *machine) {
	m.library("570.172.08")
	m.file("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.172.08  Tue Jul 8 2025\n")
	m.file("/proc/devices", "Character devices:\n195 nvidia\n510 nvidia-uvm\n")
	m.file("/sys/fs/cgroup/cgroup.controllers", "cpu")
	m.containerRuntime(containerdSocket, "containerd", `{"enableCDI":true,"cdiSpecDirs":["/etc/cdi","/run/cdi"]}`)
	m.process("1", "systemd")
	m.process("7", "nvidia-persiste")
	m.file("/run/systemd/system/any", "")
}

// Of each prerequisite it is found out whether it is met, and what is to be done if not.
func TestEachPrerequisiteIsJudged(t *testing.T) {
	hook := func(m *machine, version string) {
		m.host.Root, m.host.Hook = "/", m.file("/hook", "#!/bin/sh\necho NVIDIA CDI Hook CLI version "+version+"\n")
	}
	config := func(config string) func(*machine) {
		return func(m *machine) { m.containerRuntime(containerdSocket, "containerd", config) }
	}
	tests := map[string]struct {
		check  string
		on     func(m *machine)
		status Status
		says   string
	}{
		"no driver":            {"driver-files", func(*machine) {}, Missing, "/run/nvidia/driver, /home/kubernetes/bin/nvidia"},
		"a driver, half there": {"driver-files", func(m *machine) { m.file("/usr/lib64/libnvidia-ml.so.1", "\x7fELF") }, Missing, "is not whole"},
		"no module":            {"driver-module", func(m *machine) { m.library("570.172.08") }, Missing, "has not loaded"},
		"an upgrade without a reboot": {"driver-module", func(m *machine) {
			m.library("580.65.06")
			m.file("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.172.08  Tue\n")
		}, Missing, "version 570.172.08, and the files below"},
		"no uvm, and nothing to load it": {"nvidia-uvm", func(m *machine) { m.file("/proc/devices", "510 nvidia-uvm-tools\n") }, Missing, "has a modprobe"},
		"no uvm yet":                     {"nvidia-uvm", func(m *machine) { m.file("/proc/devices", ""); m.file("/sbin/modprobe", "") }, OK, "/sbin/modprobe"},
		"Ubuntu's modprobe": {"nvidia-uvm", func(m *machine) {
			m.file("/proc/devices", "")
			m.file("/sbin/depmod", "")
			if err := os.Symlink("/nowhere/kmod", m.host.path("/sbin/modprobe")); err != nil {
				m.Fatal(err)
			}
		}, OK, "/sbin/modprobe"},
		"a driver container's modprobe": {"nvidia-uvm", func(m *machine) {
			m.host.DriverRoot = m.host.path("/run/nvidia/driver")
			m.file("/proc/devices", "")
			m.file("/run/nvidia/driver/usr/sbin/modprobe", "")
		}, OK, "/usr/sbin/modprobe"},
		"no runtime":                      {"cdi", func(*machine) {}, Unknown, "--container-runtime-endpoint"},
		"a runtime that is gone":          {"cdi", func(m *machine) { _ = m.socket(containerdSocket).Close(); m.file(containerdSocket, "") }, Unknown, containerdSocket},
		"containerd without CDI":          {"cdi", config(`{"enableCDI":false,"cdiSpecDirs":["/var/run/cdi"]}`), Missing, "containerd v1 has enable_cdi = false"},
		"containerd before CDI":           {"cdi", config(`{"containerd":{}}`), Missing, "does not know CDI"},
		"containerd that looks elsewhere": {"cdi", config(`{"enableCDI":true,"cdiSpecDirs":["/etc/cdi"]}`), Missing, "from /etc/cdi, and the agent writes them to /var/run/cdi"},
		"containerd that tells nothing":   {"cdi", config(``), Unknown, "does not tell"},
		"k3s": {"cdi", func(m *machine) {
			m.containerRuntime("/run/k3s/containerd/containerd.sock", "containerd", `{"enableCDI":true}`)
		}, OK, "containerd v1"},
		"CRI-O":  {"cdi", func(m *machine) { m.containerRuntime("/run/crio/crio.sock", "cri-o", "") }, OK, "cri-o v1"},
		"Docker": {"cdi", func(m *machine) { m.containerRuntime("/run/cri-dockerd.sock", "docker", "") }, Unknown, "docker v1"},
		"containerd that always has CDI": {"cdi", func(m *machine) {
			m.serve(containerdSocket, &containerRuntime{name: "containerd", version: "v2.4.0", config: `{"cdiSpecDirs":["/run/cdi"]}`})
		}, OK, "containerd v2.4.0"},
		"one that looks elsewhere": {"cdi", func(m *machine) {
			m.serve(containerdSocket, &containerRuntime{name: "containerd", version: "2.4.0", config: `{"cdiSpecDirs":["/etc/cdi"]}`})
		}, Missing, "from /etc/cdi"},
		"containerd of our own": {"cdi", func(m *machine) {
			m.serve(containerdSocket, &containerRuntime{name: "containerd", version: "deadbeef.m", config: `{}`})
		}, Unknown, "does not tell whether"},
		"k3s beside Docker's containerd": {"cdi", func(m *machine) {
			m.serve(containerdSocket, nil) // it has its CRI switched off
			m.containerRuntime("/run/k3s/containerd/containerd.sock", "containerd", `{"enableCDI":false}`)
		}, Missing, "enable_cdi = false"},
		"CRI-O beside a containerd": {"cdi", func(m *machine) {
			m.containerRuntime(containerdSocket, "containerd", `{"enableCDI":false}`)
			m.containerRuntime("/run/crio/crio.sock", "cri-o", "")
		}, Unknown, "which one is the kubelet's"},
		"two that have it": {"cdi", func(m *machine) {
			m.containerRuntime(containerdSocket, "containerd", `{"enableCDI":true}`)
			m.containerRuntime("/run/crio/crio.sock", "cri-o", "")
		}, OK, "containerd v1"},
		"a pod's thousand of that name": {"dcgm", func(m *machine) {
			m.host.Dynamic = true
			for pid := range 1000 {
				m.process(strconv.Itoa(pid+2), "nv-hostengine")
			}
		}, Warning, "), and others holds"},
		"one that is named": {"cdi", func(m *machine) {
			m.host.Runtime = "unix:///run/other.sock"
			m.containerRuntime("/run/other.sock", "containerd", `{"enableCDI":true}`)
		}, OK, "containerd v1"},
		"the host's hook":              {"cdi-hook", func(m *machine) { hook(m, "1.18.0") }, OK, "1.18.0"},
		"the host's hook, and too old": {"cdi-hook", func(m *machine) { hook(m, "1.17.8") }, Missing, "1.17.8"},
		"a hook that is not there":     {"cdi-hook", func(m *machine) { m.host.Root, m.host.Hook = "/", "/no/hook" }, Missing, "/no/hook"},
		"a hook that says nothing":     {"cdi-hook", func(m *machine) { hook(m, "dev") }, Unknown, "version dev"},
		"GPUs by environment":          {"toolkit", func(m *machine) { m.file("/usr/bin/nvidia-container-runtime", "") }, Warning, "NVIDIA_VISIBLE_DEVICES"},
		"the first cgroups":            {"cgroups", func(m *machine) { m.file("/sys/fs/cgroup/memory/tasks", "") }, Warning, "v1"},
		"a device plugin":              {"device-plugin", func(m *machine) { m.socket("/kubelet/device-plugins/nvidia-gpu.sock") }, Warning, "nvidia-gpu.sock"},
		"KubeVirt's device plugin":     {"device-plugin", func(m *machine) { m.socket("/kubelet/device-plugins/kubevirt-GA100.sock") }, Warning, "kubevirt-GA100.sock"},
		"the kubelet's and another's": {"device-plugin", func(m *machine) {
			m.socket("/kubelet/device-plugins/kubelet.sock")
			m.socket("/kubelet/device-plugins/fpga.sock")
		}, OK, "none"},
		"a device plugin that is gone": {"device-plugin", func(m *machine) { m.file("/kubelet/device-plugins/nvidia-gpu.sock", "") }, OK, "none"},
		"a MIG manager":                {"mig-manager", func(m *machine) { m.process("9", "nvidia-mig-mana") }, Note, "PID 9"},
		"two who make partitions":      {"mig-manager", func(m *machine) { m.host.Dynamic = true; m.process("9", "nvidia-mig-mana") }, Warning, "PID 9"},
		"DCGM":                         {"dcgm", func(m *machine) { m.process("9", "nv-hostengine") }, Note, "nv-hostengine"},
		"DCGM and partitions":          {"dcgm", func(m *machine) { m.host.Dynamic = true; m.process("9", "dcgm-exporter") }, Warning, "dcgm-exporter"},
		"DCGM and virtual machines":    {"dcgm", func(m *machine) { m.host.Passthrough = true; m.process("9", "nv-hostengine") }, Warning, "nv-hostengine"},
		"processes of its own only":    {"dcgm", func(*machine) {}, Unknown, "no process"},
		"no persistenced":              {"persistenced", func(m *machine) { m.process("1", "systemd") }, Note, "does not run"},
		"no systemd, no cgroups":       {"mps", func(m *machine) { m.tasks() }, Note, "has no /run/systemd/system), and the agent cannot start MPS daemons itself: there is no cgroup v2"},
		"no systemd, no controllers": {"mps", func(m *machine) {
			m.tasks()
			m.file("/sys/fs/cgroup/cgroup.controllers", "cpu pids\n")
		}, Note, "no controller memory"},
		"cgroups in place of systemd": {"mps", func(m *machine) {
			m.tasks()
			m.file("/sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n")
			if err := errors.Join(os.MkdirAll(filepath.Join(m.host.Proc, "1"), 0o755), os.Symlink(m.host.Root, filepath.Join(m.host.Proc, "1/root"))); err != nil {
				m.Fatal(err)
			}
		}, OK, "processes of the agent's making"},
		"persistenced that is told": {"persistenced", func(m *machine) {
			m.host.Passthrough = true
			m.process("9", "nvidia-persiste")
			m.socket("/run/nvidia-persistenced/socket")
		}, Note, "PID 9"},
		"what is left of persistenced": {"persistenced", func(m *machine) {
			m.host.Passthrough = true
			m.process("9", "nvidia-persiste")
			m.file("/run/nvidia-persistenced/socket", "")
		}, Warning, "socket is not found"},
		"persistenced and machines": {"persistenced", func(m *machine) { m.host.Passthrough = true; m.process("9", "nvidia-persiste") }, Warning, "PID 9"},
	}
	judged := map[string]bool{}
	for name, tc := range tests {
		judged[tc.check] = true
		t.Run(name, func(t *testing.T) {
			m := newMachine(t)
			tc.on(m)
			for _, f := range New(m.host).Run(t.Context()) {
				if f.Check != tc.check {
					continue
				}
				if f.Status != tc.status || !strings.Contains(f.Message, tc.says) {
					t.Errorf("%s: %s, want %s with %q", f.Status, f.Message, tc.status, tc.says)
				}
				if toDo := tc.status != OK && tc.status != Note; toDo != (f.Do != "") {
					t.Errorf("%s: %q is to be done", f.Status, f.Do)
				}
			}
		})
	}
	for _, p := range Table() {
		if !judged[p.Name] {
			t.Errorf("no case is about %s", p.Name)
		}
	}
}

func TestAHostThatHasEverything(t *testing.T) {
	m := newMachine(t)
	well(m)
	findings := New(m.host).Run(t.Context())
	if got := Worst(findings); got != OK || len(findings) != len(Table()) {
		t.Errorf("%s with %d findings, want %s with %d: %+v", got, len(findings), OK, len(Table()), findings)
	}
	m.host.Simulated = true
	for _, f := range New(m.host).Run(t.Context()) {
		if f.Check != "cdi" && f.Check != "cgroups" {
			t.Errorf("with simulated GPUs: %+v", f)
		}
	}
}

// What hangs is told, with what it is, and nothing else waits for it; the next time nobody waits for the same again.
func TestALookThatHangsHoldsUpNothing(t *testing.T) {
	m := newMachine(t)
	well(m)
	// Reading it waits for a writer, as a dead file server would have it wait.
	if err := os.Remove(m.host.path("/proc/devices")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(m.host.path("/proc/devices"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := New(m.host)
	c.deadline = 200 * time.Millisecond
	for range 2 {
		for _, f := range c.Run(t.Context()) {
			if hangs := f.Check == "nvidia-uvm"; hangs != (f.Status == Unknown) {
				t.Errorf("%+v", f)
			} else if hangs && (!strings.Contains(f.Message, "has not answered since") || !strings.Contains(f.Do, "NFS")) {
				t.Errorf("%+v", f)
			}
		}
		c.deadline = time.Minute
	}
	c.mu.Lock()
	hanging := len(c.begun)
	c.mu.Unlock()
	if hanging != 1 {
		t.Errorf("%d looks hang, want one", hanging)
	}
	writer, err := os.OpenFile(m.host.path("/proc/devices"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
}

func TestWorst(t *testing.T) {
	of := func(statuses ...Status) (findings []Finding) {
		for _, s := range statuses {
			findings = append(findings, Finding{Status: s})
		}
		return findings
	}
	for want, findings := range map[Status][]Finding{
		OK: of(OK, Note), Warning: of(Note, Warning), Unknown: of(Warning, Unknown), Missing: of(Unknown, Missing, Warning),
	} {
		if got := Worst(findings); got != want {
			t.Errorf("%v: %s, want %s", findings, got, want)
		}
	}
}

var update = flag.Bool("update-prerequisites", false, "rewrite the table in docs/prerequisites.md")

// The list of prerequisites in the documents is this table.
func TestTheDocumentHasTheTable(t *testing.T) {
	const begin, end = "<!-- made from the table -->\n", "<!-- end of the table -->\n"
	path := filepath.Join("..", "..", "..", "docs", "prerequisites.md")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(data), begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s has no %q and %q", path, begin, end)
	}
	want := before + begin + markdown() + end + after
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
	} else if diff := cmp.Diff(want, string(data)); diff != "" {
		t.Errorf("-update-prerequisites rewrites it (-table +document):\n%s", diff)
	}
}

// markdown is the table for the documents.
func markdown() string {
	var text strings.Builder
	text.WriteString("| check | what the node needs | | if it is not so |\n|---|---|---|---|\n")
	for _, p := range Table() {
		fmt.Fprintf(&text, "| `%s` | %s | %s | %s |\n", p.Name, p.Needs, p.Level, p.Do)
	}
	return text.String()
}
