// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// runtimes are programs by which containers get GPUs, as on any node.
const (
	runc = "runc"
	hook = "nvidia-cdi-hook"
)

// checkContainers: what the agent writes for the container runtime is all that a CUDA program needs, as root, as nobody, and in a user
// namespace; and a container that was given no GPU reaches none.
func checkContainers(t *testing.T, n node, lib nvml.Library, found *discovery.Node) {
	for _, program := range []string{runc, hook} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("not run: %s is not in PATH", program)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("not run: needs root")
	}
	gpu := found.GPUs[0]
	device := firstGPU(t, lib, found)
	spec := claimSpec(t, n, gpu)
	without := *spec
	without.Devices = nil
	common := spec.ContainerEdits
	if len(common.DeviceNodes) == 0 && len(common.Mounts) == 0 {
		t.Fatalf("nothing is common to containers with a GPU: %+v", spec)
	}

	for _, user := range []struct {
		name      string
		uid       uint32
		namespace bool
	}{{name: "root"}, {name: "nobody", uid: 65534}, {name: "root of a user namespace", namespace: true}} {
		t.Run(user.name, func(t *testing.T) {
			c := startContainer(t, container{edits: []*cdispecs.ContainerEdits{&spec.ContainerEdits, &spec.Devices[0].ContainerEdits}, uid: user.uid, userNamespace: user.namespace})
			if uuid := c.must("open"); uuid != gpu.UUID {
				t.Errorf("CUDA's GPU is %s, the claim's %s", uuid, gpu.UUID)
			}
			c.must("compute")
			pid := c.pid()
			if p, ok := listed(t, device, pid); !ok || p.MemoryBytes == 0 {
				all, err := device.Processes()
				t.Errorf("process %d of the container is not among NVML's %+v, %v", pid, all, err)
			}
		})
	}
	t.Run("without a GPU", func(t *testing.T) {
		c := startContainer(t, container{edits: []*cdispecs.ContainerEdits{&spec.ContainerEdits}})
		if _, err := c.ask("open"); err == nil || !strings.Contains(err.Error(), "CUDA_ERROR_NO_DEVICE") {
			t.Errorf("CUDA without a GPU's device node: %v", err)
		}
		if _, err := c.ask(fmt.Sprintf("node 195 %d", gpu.Minor)); err == nil || !strings.Contains(err.Error(), "operation not permitted") {
			t.Errorf("a container's root makes the device node of a GPU that it was not given, and opens it: %v", err)
		}
	})
}

// claimSpec is what the agent writes of a claim of one GPU.
func claimSpec(t *testing.T, n node, gpu discovery.GPU) *cdispecs.Spec {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	hardware := driver.NewHardware(driver.HardwareOptions{Open: n.open, Clock: clock.RealClock{}})
	if _, err := hardware.Discover(ctx); err != nil {
		t.Fatal(err)
	}
	backend, err := n.backend(ctx, func() *driver.Hardware { return hardware })
	if err != nil {
		t.Fatal(err)
	}
	spec, err := cdi.BuildSpec(ctx, backend, types.UID("claim"), []cdi.Device{{Request: "gpu", Name: gpu.Name, GPU: cdi.GPU{Name: gpu.Name, UUID: gpu.UUID, PCIBusID: gpu.PCIBusID, Minor: gpu.Minor}}})
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

// firstID is the machine's for root of a user namespace.
const firstID = 1 << 20

// container is how a client runs in one.
type container struct {
	edits         []*cdispecs.ContainerEdits
	uid           uint32
	userNamespace bool
	env           []string
}

// contained is a client in a container of its own.
type contained struct {
	*client
	id, state string
}

// pid is the client's, on the machine.
func (c contained) pid() int {
	c.t.Helper()
	out, err := exec.Command(runc, "--root", c.state, "state", c.id).Output()
	if err != nil {
		c.t.Fatalf("%s state: %v", runc, err)
	}
	var state specs.State
	if err := json.Unmarshal(out, &state); err != nil {
		c.t.Fatal(err)
	}
	return state.Pid
}

// startContainer makes a container of which nothing is NVIDIA's but what the edits bring: the test's program, the C library, /proc and /dev.
func startContainer(t *testing.T, of container) contained {
	t.Helper()
	bundle, err := os.MkdirTemp("", "stowage-test-gpu")
	if err != nil {
		t.Fatal(err)
	}
	c := contained{id: filepath.Base(bundle), state: filepath.Join(bundle, "state")}
	sweep(t, runc+` --root "$1" delete --force "$2" && rm -r "$3"`, c.state, c.id, bundle)
	root := filepath.Join(bundle, "rootfs")
	for _, dir := range []string{bundle, root, root + "/etc", root + "/etc/ld.so.conf.d", root + "/lib64", root + "/usr/lib/x86_64-linux-gnu", root + "/tmp", root + "/proc", root + "/dev", root + "/sys"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(root+"/tmp", 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	folder, loader := libc(t)
	copyFile(t, "/proc/self/exe", root+"/client")
	copyFile(t, loader, root+"/lib64/ld-linux-x86-64.so.2")
	for _, name := range []string{"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"} {
		copyFile(t, filepath.Join(folder, name), root+"/usr/lib/x86_64-linux-gnu/"+name)
	}
	if err := os.WriteFile(root+"/etc/ld.so.conf", []byte("include /etc/ld.so.conf.d/*.conf\n/usr/lib/x86_64-linux-gnu\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if of.userNamespace { // as container engines do
		if err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			return errors.Join(err, os.Lchown(path, firstID, firstID))
		}); err != nil {
			t.Fatal(err)
		}
	}
	config := ociConfig(of)
	for _, edits := range of.edits {
		if err := (&cdilib.ContainerEdits{ContainerEdits: edits}).Apply(config); err != nil {
			t.Fatal(err)
		}
	}
	data, err := json.MarshalIndent(config, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), data, 0o644); err != nil {
		t.Fatal(err)
	}
	c.client = startClient(t, t.Name(), nil, runc, "--root", c.state, "run", "--bundle", bundle, c.id)
	return c
}

// kill ends the container at once.
func (c contained) kill() {
	out, err := exec.Command(runc, "--root", c.state, "kill", c.id, "KILL").CombinedOutput()
	if err != nil {
		c.t.Errorf("%s kill: %v: %s", runc, err, out)
	}
	c.end()
}

func ociConfig(of container) *specs.Spec {
	capabilities := []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID", "CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL", "CAP_AUDIT_WRITE"}
	granted := &specs.LinuxCapabilities{Bounding: capabilities}
	if of.uid == 0 {
		granted.Effective, granted.Permitted = capabilities, capabilities
	}
	config := &specs.Spec{
		Version: "1.0.2",
		Root:    &specs.Root{Path: "rootfs"},
		Process: &specs.Process{
			User: specs.User{UID: of.uid, GID: of.uid}, Cwd: "/", Args: []string{"/client"},
			Env:          append([]string{"PATH=/usr/bin:/bin", clientEnv + "=1"}, of.env...),
			Capabilities: granted, NoNewPrivileges: of.uid != 0,
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}},
			{Destination: "/sys", Type: "bind", Source: "/sys", Options: []string{"rbind", "nosuid", "noexec", "nodev", "ro"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace}},
			Resources:  &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
		},
	}
	if of.userNamespace {
		config.Linux.Namespaces = append(config.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
		config.Linux.UIDMappings = []specs.LinuxIDMapping{{HostID: firstID, Size: 1 << 16}}
		config.Linux.GIDMappings = config.Linux.UIDMappings
	}
	return config
}

func copyFile(t *testing.T, from, to string) {
	t.Helper()
	data, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, data, 0o755)
	}
	if err == nil {
		err = os.Chmod(to, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// waitFor polls until it is so.
func waitFor(t *testing.T, what string, within time.Duration, so func() bool) (took time.Duration) {
	t.Helper()
	began := time.Now()
	for !so() {
		if took = time.Since(began); took > within {
			t.Errorf("%s: not within %s", what, within)
			return took
		}
		time.Sleep(5 * time.Millisecond)
	}
	return time.Since(began)
}

// tmpfs mounts one as the agent does for a daemon of MPS: without execution, devices and links.
func tmpfs(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/run", "stowage-test-gpu")
	if err != nil {
		t.Fatal(err)
	}
	sweep(t, `umount -l "$1"; rmdir "$1"`, dir)
	if err := unix.Mount("stowage-test", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_NOSYMFOLLOW, "size=64m,nr_inodes=4096,mode=0755"); err != nil {
		t.Fatal(err)
	}
	return dir
}
