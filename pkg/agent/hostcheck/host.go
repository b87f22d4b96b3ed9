// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hostcheck

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/mod/semver"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// Auto stands for what is found by itself.
const Auto = "auto"

// Host says where things are, and what the agent does with them.
type Host struct {
	// Root is the host's root folder as this program sees it, and Proc its /proc.
	Root, Proc string
	// DriverRoot is the folder below which this program sees the driver's files.
	DriverRoot string
	// KubeletRoot is the kubelet's --root-dir, and CDIDir the folder of CDI specifications, both as the host names them.
	KubeletRoot, CDIDir string
	// Runtime is the path of the container runtime's CRI socket on the host, or Auto.
	Runtime string
	// Hook is the host's nvidia-cdi-hook that the agent is told to use; empty if it brings its own.
	Hook string
	// ToolkitConfig is a path on the host, or cdi.AutoToolkitConfig; nothing is looked at if it is empty.
	ToolkitConfig string
	// MPSRoot has the folders of MPS daemons, which are not in a sandbox if MPSUnconfined is set.
	MPSRoot       string
	MPSUnconfined bool
	// Simulated: there is no real driver. Dynamic: the agent makes partitions. Passthrough: it takes GPUs from the driver.
	Simulated, Dynamic, Passthrough bool
}

func (h *Host) path(onHost string) string { return filepath.Join(h.Root, onHost) }

func (h *Host) exists(onHost string) bool {
	_, err := os.Stat(h.path(onHost))
	return err == nil
}

func driverFiles(_ context.Context, h *Host) (Status, string) {
	path := nvml.LibraryAt(h.DriverRoot)
	if path == "" {
		return Missing, fmt.Sprintf("there is no libnvidia-ml.so.1 below %s, nor below %s of the host", h.DriverRoot, nvml.DriverRoots())
	}
	if err := nvml.CheckLibrary(path); err != nil {
		return Missing, err.Error()
	}
	return OK, path + " " + nvml.LibraryVersion(path)
}

func driverModule(_ context.Context, h *Host) (Status, string) {
	loaded, line, err := nvml.RealDriverLoaded(h.Proc)
	switch version, files := nvml.KernelDriverVersion(h.Proc), nvml.LibraryVersion(nvml.LibraryAt(h.DriverRoot)); {
	case err != nil:
		return Unknown, err.Error()
	case !loaded:
		return Missing, "the kernel has not loaded the module nvidia"
	case version != "" && files != "" && version != files:
		return Missing, fmt.Sprintf("the kernel has loaded version %s, and the files below %s have version %s", version, h.DriverRoot, files)
	case version == "":
		return OK, line
	default:
		return OK, "version " + version
	}
}

// modprobes are where it is on a host, or in a driver container.
var modprobes = []string{"/sbin/modprobe", "/usr/sbin/modprobe", "/bin/modprobe", "/usr/bin/modprobe"}

func uvm(_ context.Context, h *Host) (Status, string) {
	data, err := os.ReadFile(filepath.Join(h.Proc, "devices"))
	if err != nil {
		return Unknown, err.Error()
	}
	if regexp.MustCompile(`(?m)^ *[0-9]+ nvidia-uvm$`).Match(data) {
		return OK, "it is loaded"
	}
	for _, root := range []string{h.Root, h.DriverRoot} {
		for _, path := range modprobes {
			// What it links to may be named from the host's root: Ubuntu's is a link to /bin/kmod.
			if _, err := os.Lstat(filepath.Join(root, path)); err == nil {
				return OK, fmt.Sprintf("it is not loaded, the agent loads it with %s in %s when a claim needs it", path, root)
			}
		}
	}
	return Missing, "it is not loaded, and neither the host nor the driver's folder has a modprobe in " + strings.Join(modprobes, ", ")
}

// runtimes are the CRI sockets of a host, in the order in which they are looked for: containerd, k3s and RKE2, CRI-O, k0s, MicroK8s.
var runtimes = []string{
	"/run/containerd/containerd.sock", "/run/k3s/containerd/containerd.sock", "/run/crio/crio.sock", "/run/k0s/containerd.sock",
	"/var/snap/microk8s/common/run/containerd.sock", "/run/cri-dockerd.sock",
}

// cdiInRuntime asks the runtime itself what it was configured with: files would have to be read as it reads them. A host may have
// several, as k3s beside Docker's containerd, and only the kubelet knows which one is its own: those that do not answer by the CRI are
// not, and where several do they have to agree.
func cdiInRuntime(ctx context.Context, h *Host) (Status, string) {
	if h.Runtime != Auto {
		return askRuntime(ctx, h, h.Runtime)
	}
	sockets := slices.DeleteFunc(slices.Clone(runtimes), func(socket string) bool { return !h.exists(socket) })
	statuses, messages := make([]Status, len(sockets)), make([]string, len(sockets))
	var group sync.WaitGroup
	for i, socket := range sockets {
		group.Go(func() { statuses[i], messages[i] = askRuntime(ctx, h, socket) })
	}
	group.Wait()
	if len(sockets) == 0 {
		return Unknown, "no container runtime has a socket in " + strings.Join(runtimes, ", ") + ": --container-runtime-endpoint says where it is"
	}
	judged := slices.IndexFunc(statuses, func(s Status) bool { return s != Unknown })
	if judged < 0 {
		return Unknown, strings.Join(messages, "; ")
	}
	for _, status := range statuses {
		if status != Unknown && status != statuses[judged] {
			return Unknown, strings.Join(messages, "; ") + ": --container-runtime-endpoint says which one is the kubelet's"
		}
	}
	return statuses[judged], messages[judged]
}

func askRuntime(ctx context.Context, h *Host, socket string) (Status, string) {
	connection, err := grpc.NewClient("unix://"+h.path(strings.TrimPrefix(socket, "unix://")),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return Unknown, err.Error()
	}
	defer connection.Close()
	client := runtimeapi.NewRuntimeServiceClient(connection)
	version, err := client.Version(ctx, &runtimeapi.VersionRequest{})
	if err != nil {
		return Unknown, fmt.Sprintf("the container runtime at %s: %v", socket, err)
	}
	name := version.GetRuntimeName() + " " + version.GetRuntimeVersion()
	switch version.GetRuntimeName() {
	case "containerd":
	case "cri-o":
		return OK, name
	case "docker":
		return Unknown, name + ": whether its CRI passes on CDI devices is not told (cri-dockerd does since the end of 2025, Docker since 25)"
	default:
		return Unknown, name + " at " + socket + " is not known"
	}
	status, err := client.Status(ctx, &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		return Unknown, fmt.Sprintf("%s at %s: %v", name, socket, err)
	}
	return judgeContainerd(version.GetRuntimeVersion(), status.GetInfo()["config"], h.CDIDir)
}

// judgeContainerd reads the configuration that containerd runs with, as its CRI tells it. Before 1.7 it has no enable_cdi; in 2.x it is
// true unless set otherwise, and is to go: CDI is always on then.
func judgeContainerd(version, configuration, cdiDir string) (Status, string) {
	name, release := "containerd "+version, "v"+strings.TrimPrefix(version, "v")
	var config struct {
		Enabled *bool    `json:"enableCDI"`
		Dirs    []string `json:"cdiSpecDirs"`
	}
	if err := json.Unmarshal([]byte(configuration), &config); err != nil {
		return Unknown, fmt.Sprintf("%s does not tell its configuration: %v", name, err)
	}
	switch {
	case config.Enabled == nil && !semver.IsValid(release):
		return Unknown, name + " does not tell whether it has CDI"
	case config.Enabled == nil && semver.Compare(release, "v1.7.0-0") < 0:
		return Missing, name + " does not know CDI"
	case config.Enabled != nil && !*config.Enabled:
		return Missing, name + " has enable_cdi = false"
	case len(config.Dirs) > 0 && !slices.ContainsFunc(config.Dirs, func(dir string) bool { return sameRun(dir) == sameRun(cdiDir) }):
		return Missing, fmt.Sprintf("%s reads CDI specifications from %s, and the agent writes them to %s", name,
			strings.Join(config.Dirs, ", "), cdiDir)
	}
	return OK, name
}

// sameRun names /var/run as /run, to which it links.
func sameRun(path string) string {
	path = filepath.Clean(path)
	if rest, ok := strings.CutPrefix(path, "/var/run/"); ok {
		return "/run/" + rest
	}
	return path
}

// oldestHook is the first that does not fail on names of hooks that it does not know.
const oldestHook = "v1.18.0"

func cdiHook(ctx context.Context, h *Host) (Status, string) {
	if h.Hook == "" {
		return OK, "the agent brings its own"
	}
	cmd := exec.CommandContext(ctx, h.Hook, "--version")
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay, cmd.Dir = &said, &said, time.Second, "/"
	if h.Root != "/" {
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: h.Root}
	}
	if err := cmd.Run(); err != nil {
		status := Unknown
		if errors.Is(err, fs.ErrNotExist) {
			status = Missing
		}
		return status, fmt.Sprintf("%s --version: %v", h.Hook, err)
	}
	version := regexp.MustCompile(`[0-9]+\.[0-9]+\.[0-9]+`).FindString(said.String())
	switch {
	case version == "":
		return Unknown, fmt.Sprintf("%s --version says %.80q", h.Hook, said.String())
	case semver.Compare("v"+version, oldestHook) < 0:
		return Missing, fmt.Sprintf("%s has version %s, and containers fail with it", h.Hook, version)
	}
	if warning := cdi.HookWarning(h.Root, h.Hook); warning != "" {
		return Warning, warning
	}
	return OK, h.Hook + " " + version
}

func toolkit(_ context.Context, h *Host) (Status, string) {
	if h.ToolkitConfig == "" {
		return Note, "it is not looked at"
	}
	if warning := cdi.GPUsByEnvironment(h.Root, h.ToolkitConfig); warning != "" {
		return Warning, warning
	}
	return OK, "NVIDIA_VISIBLE_DEVICES gives no GPUs, or NVIDIA's container runtime is not installed"
}

func cgroups(_ context.Context, h *Host) (Status, string) {
	if h.exists("/sys/fs/cgroup/cgroup.controllers") {
		return OK, "v2"
	}
	if h.exists("/sys/fs/cgroup") {
		return Warning, "v1"
	}
	return Unknown, "the host has no /sys/fs/cgroup"
}

// devicePlugin looks for sockets of device plugins of NVIDIA's, Google's and KubeVirt's that somebody serves.
func devicePlugin(ctx context.Context, h *Host) (Status, string) {
	folder := h.path(filepath.Join(h.KubeletRoot, "device-plugins"))
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Unknown, err.Error()
	}
	var served []string
	for _, entry := range entries {
		name := entry.Name()
		if !strings.HasSuffix(name, ".sock") || !strings.HasPrefix(name, "nvidia") && !strings.HasPrefix(name, "kubevirt-") {
			continue
		}
		connection, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(folder, name))
		if err != nil {
			continue // one that has ended
		}
		_ = connection.Close()
		served = append(served, name)
	}
	if len(served) > 0 {
		return Warning, "a device plugin serves " + strings.Join(served, ", ")
	}
	return OK, "none"
}

func migManager(_ context.Context, h *Host) (Status, string) {
	return h.beside(h.Dynamic, "makes partitions beside the agent, which makes them for claims", "nvidia-mig-mana", "nvidia-mig-part")
}

func dcgm(_ context.Context, h *Host) (Status, string) {
	return h.beside(h.Dynamic || h.Passthrough, "holds GPUs and partitions that the agent is to change", "nv-hostengine", "dcgm-exporter")
}

func persistenced(_ context.Context, h *Host) (Status, string) {
	const socket = "nvidia-persistenced/socket"
	asked := slices.ContainsFunc([]string{h.DriverRoot, h.Root}, func(root string) bool {
		for _, run := range []string{"run", "var/run"} {
			if info, err := os.Stat(filepath.Join(root, run, socket)); err == nil && info.Mode()&fs.ModeSocket != 0 {
				return true
			}
		}
		return false
	})
	status, message := h.beside(h.Passthrough && !asked,
		"holds GPUs that the agent is to take from the driver, and is not told to let go: its socket is not found", "nvidia-persiste")
	if status == OK {
		return Note, "it does not run: where nobody else has a GPU open, the first container on it starts some seconds later"
	}
	return status, message
}

func mps(_ context.Context, h *Host) (Status, string) {
	how, err := sharing.CheckHost(sharing.DriverOptions{HostRoot: h.Root, ProcRoot: h.Proc, MPSRoot: h.MPSRoot, Unconfined: h.MPSUnconfined})
	if err != nil {
		return Note, err.Error()
	}
	return OK, "MPS daemons are " + how
}

// maxNamed processes are named: any pod may have thousands of such a name, and what is found goes into the Node.
const maxNamed = 4

// beside looks for programs by the names that the kernel keeps of them (15 bytes). They are in the way if inTheWay is set.
func (h *Host) beside(inTheWay bool, how string, names ...string) (Status, string) {
	commands, err := filepath.Glob(filepath.Join(h.Proc, "[0-9]*", "comm"))
	if err != nil || len(commands) == 0 {
		return Unknown, "no process is seen in " + h.Proc
	}
	var found []string
	for _, path := range commands {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		if name := strings.TrimSpace(string(data)); slices.Contains(names, name) {
			if len(found) == maxNamed {
				found = append(found, "and others")
				break
			}
			found = append(found, fmt.Sprintf("%s (PID %s)", name, filepath.Base(filepath.Dir(path))))
		}
	}
	switch {
	case len(found) == 0:
		return OK, "none"
	case inTheWay:
		return Warning, strings.Join(found, ", ") + " " + how
	}
	return Note, strings.Join(found, ", ") + ": beside the agent as its flags are, it is in nobody's way"
}
