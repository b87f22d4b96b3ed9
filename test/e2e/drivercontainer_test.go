// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/internal/localcluster/image"
	"stowage.dev/stowage/internal/localcluster/image/report"
	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/internal/localcluster/node/enclosure"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/install"
)

const (
	containerNode = "driver-container"
	// gpuMajor is a device number that the kernel sets aside for local use; nvidia-uvm's is the next. NVIDIA's own would be a real driver's.
	gpuMajor = 124
)

// driverContainer is a machine whose driver is in a container, as the GPU operator installs it: below /run/nvidia/driver, which is
// mounted and unmounted, with its own files in /proc. The agent there knows nothing of a simulation.
type driverContainer struct {
	t       *testing.T
	folder  string
	machine *nvmlsim.Machine
	node    *node.Node
	// modprobe is the program of the driver container.
	modprobe string
}

func startDriverContainerNode(t *testing.T) *driverContainer {
	t.Helper()
	d := &driverContainer{t: t, folder: t.TempDir()}
	p, err := nvmlsim.LoadProfile(strings.TrimPrefix(profile, "sim:"))
	mustDo(t, err)
	d.machine, err = nvmlsim.OpenMachine(p, containerNode, d.path("sim"))
	mustDo(t, err)
	_, err = d.machine.Do(&nvmlsim.UnloadDriver{})
	mustDo(t, err)
	d.modprobe = d.path("modprobe")
	mustDo(t, image.Compile(t.Context(), "stowage.dev/stowage/test/e2e/modprobe", d.modprobe))
	// What prepares a container is the host's program; what it does there is not tested here.
	hook := d.write("bin/nvidia-cdi-hook", "#!/bin/sh\nexit 0\n")
	mustDo(t, os.Chmod(hook, 0o755))
	d.write("proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n")
	mustDo(t, os.MkdirAll(d.path("proc", "driver"), 0o755))
	mustDo(t, os.MkdirAll(d.path("run", "driver"), 0o755))
	binds := []enclosure.Bind{
		{Source: d.path("run"), Target: "/run/nvidia"},
		{Source: d.path("proc", "driver"), Target: "/proc/driver"},
		{Source: d.path("proc", "devices"), Target: "/proc/devices"},
	}
	// The host's own modprobe would load a module of this machine, if it has one.
	for _, place := range []string{"/sbin/modprobe", "/usr/sbin/modprobe", "/bin/modprobe", "/usr/bin/modprobe"} {
		if program, err := filepath.EvalSymlinks(place); err == nil {
			binds = append(binds, enclosure.Bind{Source: d.modprobe, Target: program})
		}
	}
	d.node, err = node.Start(t.Context(), cluster.Cluster, node.Options{Name: containerNode, Binds: binds, Agent: node.Agent{
		Binary: unconfinedAgent, NVML: "auto", Args: []string{"--nvidia-cdi-hook=" + hook, lockTimeout},
		Env: []string{nvmlsim.EnvSocket + "=" + filepath.Join(d.path("sim"), nvmlsim.ControlSocket)},
	}})
	mustDo(t, err)
	t.Cleanup(func() {
		if err := d.node.Stop(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func (d *driverContainer) path(elem ...string) string {
	return filepath.Join(append([]string{d.folder}, elem...)...)
}

func (d *driverContainer) write(name, content string) (path string) {
	d.t.Helper()
	path = d.path(name)
	mustDo(d.t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)))
	return path
}

// inside runs a command where the node sees what it sees.
func (d *driverContainer) inside(args ...string) {
	d.t.Helper()
	command := d.node.Enter(args[0], args[1:]...)
	if out, err := exec.CommandContext(d.t.Context(), command[0], command[1:]...).CombinedOutput(); err != nil {
		d.t.Fatalf("%v: %v: %s", args, err, out)
	}
}

// install starts the container of a driver: its root is mounted, and then its module is loaded.
func (d *driverContainer) install(version string) {
	d.t.Helper()
	root := "driver-" + version
	libraries := root + "/usr/lib/x86_64-linux-gnu"
	for _, file := range []string{"libcuda.so.", "libnvidia-ptxjitcompiler.so."} {
		d.write(filepath.Join(libraries, file+version), "")
	}
	built := filepath.Join(cluster.Manifest(".."), "bin", "nvml", "libnvidia-ml.so.1")
	mustDo(d.t, install.Library(built, d.path(libraries, "libnvidia-ml.so."+version), version))
	mustDo(d.t, os.Symlink("libnvidia-ml.so."+version, d.path(libraries, "libnvidia-ml.so.1")))
	for _, program := range []string{"nvidia-smi", "nvidia-cuda-mps-control"} {
		mustDo(d.t, os.Chmod(d.write(filepath.Join(root, "usr", "bin", program), ""), 0o755))
	}
	// The container has a modprobe of its own, and the kernel's /proc.
	mustDo(d.t, errors.Join(os.MkdirAll(d.path(root, "sbin"), 0o755), os.MkdirAll(d.path(root, "proc"), 0o755)))
	mustDo(d.t, errors.Join(
		os.Link(d.modprobe, d.path(root, "sbin", "modprobe")),
		os.Link(d.path("proc", "devices"), d.path(root, "proc", "devices")),
	))
	d.inside("/bin/mount", "--bind", d.path(root), "/run/nvidia/driver")

	d.write("proc/devices", fmt.Sprintf("Character devices:\n  1 mem\n%3d nvidia\n\nBlock devices:\n", gpuMajor))
	d.write("proc/driver/nvidia/params", "DeviceFileMode: 384\n") // so that no nodes are made in this machine's /dev
	_, err := d.machine.Do(&nvmlsim.LoadDriver{Version: version})
	mustDo(d.t, err)
	d.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "+version+"  Release Build\n")
}

// uninstall is what k8s-driver-manager does once nobody has the driver open.
func (d *driverContainer) uninstall() {
	d.t.Helper()
	if users := d.machine.Users(); len(users) > 0 {
		d.t.Fatalf("rmmod: the module nvidia is in use by %v", users)
	}
	_, err := d.machine.Do(&nvmlsim.UnloadDriver{})
	mustDo(d.t, err)
	mustDo(d.t, os.RemoveAll(d.path("proc", "driver", "nvidia")))
	d.write("proc/devices", "Character devices:\n  1 mem\n\nBlock devices:\n")
	// Lazily, as k8s-driver-manager does: whoever has loaded a library has it mapped.
	d.inside("/bin/umount", "--recursive", "--lazy", "/run/nvidia/driver")
}

// label gives the Node these labels.
func (d *driverContainer) label(value string) {
	d.t.Helper()
	var labels []string
	for _, part := range []string{"operator-validator", "container-toolkit", "gpu-feature-discovery", "dcgm-exporter"} {
		labels = append(labels, fmt.Sprintf("%q:%q", "nvidia.com/gpu.deploy."+part, value))
	}
	_, err := cluster.AdminClient().CoreV1().Nodes().Patch(d.t.Context(), containerNode, types.MergePatchType,
		[]byte(`{"metadata":{"labels":{`+strings.Join(labels, ",")+`}}}`), metav1.PatchOptions{})
	mustDo(d.t, err)
}

// published waits until all GPUs are, with the version of the driver and without a taint.
func (d *driverContainer) published(version string) {
	d.t.Helper()
	poll(d.t, "the agent publishes driver "+version, func(ctx context.Context) error {
		ofNode := metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + containerNode}
		list, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(ctx, ofNode)
		if err != nil {
			return err
		}
		devices := 0
		for _, slice := range list.Items {
			for _, device := range slice.Spec.Devices {
				if v := device.Attributes["driverVersion"].VersionValue; v == nil || !sameVersion(*v, version) {
					return fmt.Errorf("device %s has the driver version %v", device.Name, v)
				}
				if len(device.Taints) > 0 {
					return fmt.Errorf("device %s has the taints %v", device.Name, device.Taints)
				}
				devices++
			}
		}
		if devices != gpuCount {
			return fmt.Errorf("it publishes %d devices", devices)
		}
		return nil
	})
}

// The driver is in a container that comes after the agent. nvidia-uvm is loaded for the first claim, and containers have the driver's
// nodes by number: nobody has made any. Then the driver is upgraded as the GPU operator does it (k8s-driver-manager 0.12): it pauses
// its parts, evicts the pods, unloads the module, unmounts the root, and takes the pause back before there is another driver.
func TestTheDriverContainerIsUpgraded(t *testing.T) {
	namespace := newNamespace(t) // which goes after the node
	d := startDriverContainerNode(t)
	onNode := func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: containerNode} }
	waitDescribedOn(t, containerNode, "GPUsReady", "False", "NoGPUsFound", "libnvidia-ml.so.1")

	const before, after = "580.65.06", "590.48.01"
	d.install(before)
	d.published(before)
	createPod(t, namespace, "first", 2, onNode)
	createPod(t, namespace, "evicted", 1, onNode)
	first, evicted := pod{t: t, namespace: namespace, name: "first"}, pod{t: t, namespace: namespace, name: "evicted"}
	for p, gpus := range map[pod]int{first: 2, evicted: 1} {
		p.waitRunning()
		d.checkNodes(p.report(d.node, "main"), gpus)
		d.checkFiles(p.report(d.node, "main"), before)
	}
	first.delete()

	log := d.node.LogFile("agent")
	pid, logged := d.node.Agent().Pid(), logSize(t, log)
	d.label("paused-for-driver-upgrade")
	evicted.delete()
	poll(t, "no agent has the driver open", func(context.Context) error {
		if users := d.machine.Users(); len(users) > 0 {
			return fmt.Errorf("processes %v have", users)
		}
		return nil
	})
	d.uninstall()
	d.label("true")
	createPod(t, namespace, "next", gpuCount, onNode)
	waitDescribedOn(t, containerNode, "GPUsReady", "False", "", "driver")
	d.install(after)
	d.published(after)
	next := pod{t: t, namespace: namespace, name: "next"}
	next.waitRunning()
	d.checkNodes(next.report(d.node, "main"), gpuCount)
	d.checkFiles(next.report(d.node, "main"), after)
	if lines := linesSince(t, log, logged, `"Starting"`); len(lines) == 0 || d.node.Agent().Pid() != pid {
		t.Errorf("the agent is process %d, and was %d; the log has %q", d.node.Agent().Pid(), pid, lines)
	}
	files, err := filepath.Glob(filepath.Join(d.node.CDIDir(), "*.json"))
	mustDo(t, err)
	if len(files) != 1 {
		t.Errorf("CDI files %v; want that of the pod's claim", files)
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		mustDo(t, err)
		if want := "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so." + after; !strings.Contains(string(content), want) {
			t.Errorf("%s has not %s", file, want)
		}
	}
	next.delete()
}

// checkFiles checks that a container has the libraries and programs of the driver of that version, where it would look for them, and no others.
func (d *driverContainer) checkFiles(r *report.Report, version string) {
	d.t.Helper()
	want := []string{"/usr/bin/nvidia-cuda-mps-control", "/usr/bin/nvidia-smi"}
	for _, library := range []string{"libcuda.so.", "libnvidia-ml.so.", "libnvidia-ptxjitcompiler.so."} {
		want = append(want, "/usr/lib/x86_64-linux-gnu/"+library+version)
	}
	if diff := cmp.Diff(want, r.Files); diff != "" {
		d.t.Errorf("files of the driver in the container (-want +got):\n%s", diff)
	}
}

// checkNodes checks that a container has so many GPUs' nodes, with the driver's numbers, the control nodes, and may open them.
func (d *driverContainer) checkNodes(r *report.Report, gpus int) {
	d.t.Helper()
	want := map[string]string{
		"/dev/nvidiactl": fmt.Sprintf("%d:255", gpuMajor), "/dev/nvidia-uvm": fmt.Sprintf("%d:0", gpuMajor+1),
		"/dev/nvidia-uvm-tools": fmt.Sprintf("%d:1", gpuMajor+1),
	}
	got := map[string]string{}
	for _, node := range r.Devices {
		if node.Open != report.Admitted || node.Mode != "0666" {
			d.t.Errorf("%s has mode %s, and open gives %s", node.Path, node.Mode, node.Open)
		}
		if number := fmt.Sprintf("%d:%d", node.Major, node.Minor); fmt.Sprintf("/dev/nvidia%d", node.Minor) == node.Path {
			gpus--
			if node.Major != gpuMajor {
				d.t.Errorf("%s is %s", node.Path, number)
			}
		} else {
			got[node.Path] = number
		}
	}
	if gpus != 0 || !maps.Equal(got, want) {
		d.t.Errorf("the container has %v; want %v, and %d GPUs more", r.Devices, slices.Sorted(maps.Keys(want)), gpus)
	}
}
