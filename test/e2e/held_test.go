// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/pkg/nvmlsim"
)

const heldNode = "held"

// Stand-ins for programs of the host that have GPUs open: DCGM watches GPU 0, and nvidia-persistenced has GPU 1.
var (
	dcgm         = nvmlsim.Client{PID: 4801, Command: "nv-hostengine", GPUs: []int{0}, Watches: true}
	persistenced = nvmlsim.Client{PID: 4802, Command: "nvidia-persiste", GPUs: []int{1}}
)

// heldMachine is a node whose GPUs others have open, too.
type heldMachine struct {
	t    *testing.T
	node *node.Node
}

func (h *heldMachine) do(c nvmlsim.Command) error {
	_, err := nvmlsim.Control(h.t.Context(), filepath.Join(h.node.SimulationDir(), nvmlsim.ControlSocket), c)
	return err
}

func (h *heldMachine) state() *nvmlsim.State {
	h.t.Helper()
	result, err := nvmlsim.Control(h.t.Context(), filepath.Join(h.node.SimulationDir(), nvmlsim.ControlSocket), &nvmlsim.ShowState{})
	mustDo(h.t, err)
	return result.State
}

// create makes a pod on the node with a claim of its own for a device of that class, of the GPU at a PCI address.
func (h *heldMachine) create(namespace, name, class, where string) pod {
	h.t.Helper()
	_, err := cluster.AdminClient().ResourceV1().ResourceClaims(namespace).Create(h.t.Context(), &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{
				DeviceClassName: class, Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: where}}},
			},
		}}}},
	}, metav1.CreateOptions{})
	mustDo(h.t, err)
	h.createUser(namespace, name, name, 0)
	return pod{t: h.t, namespace: namespace, name: name}
}

// delete deletes the pod, and the claim of its name.
func (h *heldMachine) delete(p pod) {
	h.t.Helper()
	p.delete()
	mustDo(h.t, cluster.AdminClient().ResourceV1().ResourceClaims(p.namespace).Delete(h.t.Context(), p.name, metav1.DeleteOptions{}))
}

// createUser makes a pod on the node that has the claim, and runs as that user.
func (h *heldMachine) createUser(namespace, name, claim string, user int64) {
	h.t.Helper()
	object := podWithClaim(name, claim)
	object.Spec.ResourceClaims[0] = corev1.PodResourceClaim{Name: claim, ResourceClaimName: ptr.To(claim)}
	object.Spec.NodeSelector = map[string]string{corev1.LabelHostname: heldNode}
	if user > 0 {
		object.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: ptr.To(user), RunAsNonRoot: ptr.To(true)}
	}
	create(h.t, namespace, object)
}

// refused waits until the kubelet says that the pod's claim is not prepared, because of that.
func (p pod) refused(texts ...string) {
	p.t.Helper()
	poll(p.t, fmt.Sprintf("pod %s is told %q", p.name, texts), func(ctx context.Context) error {
		events, err := cluster.AdminClient().CoreV1().Events(p.namespace).List(ctx, metav1.ListOptions{
			FieldSelector: "reason=FailedPrepareDynamicResources,involvedObject.name=" + p.name,
		})
		if err != nil {
			return err
		}
		var said []string
		for _, event := range events.Items {
			if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(event.Message, text) }) {
				return nil
			}
			said = append(said, event.Message)
		}
		return fmt.Errorf("it is told %q", said)
	})
}

// DCGM and persistenced have GPUs open, of which NVML's lists of processes say nothing. What they keep from being done to a GPU fails
// with their names, leaves nothing half done, and works when they have let go; a pod that ends beside them goes.
func TestGPUsThatDCGMAndPersistencedHold(t *testing.T) {
	namespace := newNamespace(t) // which goes after the node
	// To mount daemons' folders takes more rights than the agents of the other tests have.
	mustDo(t, cluster.InstallDriver(heldNode, driverOfProfile(t)))
	n, err := node.Start(t.Context(), cluster.Cluster, node.Options{Name: heldNode, Agent: node.Agent{
		Binary: unconfinedAgent, NVML: profile, Args: []string{
			"--sim-library=" + cluster.Library(heldNode), "--partitions=dynamic", "--passthrough",
			"--sim-mps-folders", "--mps-root=" + filepath.Join(t.TempDir(), "mps"), lockTimeout,
		},
	}})
	mustDo(t, err)
	t.Cleanup(func() {
		if err := n.Stop(); err != nil {
			t.Error(err)
		}
	})
	h := &heldMachine{t: t, node: n}
	names, err := nvmlsim.Control(t.Context(), filepath.Join(n.SimulationDir(), nvmlsim.ControlSocket), &nvmlsim.ShowState{})
	mustDo(t, err)
	at := func(gpu int) string {
		return fmt.Sprintf(`device.attributes["resource.kubernetes.io"].pciBusID == %q`, names.GPUs[gpu].Address)
	}
	partition := func(gpu int) string { return at(gpu) + ` && device.attributes["gpu.nvidia.com"].profile == "1g.10gb"` }
	const mig, vm = "mig.nvidia.com", "vfio.gpu.nvidia.com"
	mustDo(t, h.do(&nvmlsim.AddClient{Client: dcgm}))
	mustDo(t, h.do(&nvmlsim.AddClient{Client: persistenced}))

	// MIG cannot be switched on beside DCGM, and does not stay pending. The kubelet tries again only after a minute: other pods come then.
	beside := h.create(namespace, "beside", mig, partition(0))
	beside.refused("In use by another client", "process 4801 (nv-hostengine)")
	if g := h.state().GPUs[0]; g.MIG || g.PendingMIG || len(g.Instances) > 0 {
		t.Errorf("MIG is %t, pending %t, instances %+v", g.MIG, g.PendingMIG, g.Instances)
	}
	// The driver does not let go of a GPU that persistenced has open.
	machine := h.create(namespace, "machine", vm, at(1))
	machine.refused("process 4802 (nvidia-persiste)")
	if h.state().GPUs[1].Functions != nil {
		t.Errorf("functions of GPU 1: %+v", h.state().GPUs[1].Functions)
	}
	for gpu, holder := range []string{"nv-hostengine", "nvidia-persiste"} {
		if err := h.do(&nvmlsim.ResetGPU{GPU: fmt.Sprint(gpu)}); err == nil || !strings.Contains(err.Error(), holder) {
			t.Errorf("reset of GPU %d: %v", gpu, err)
		}
	}
	h.delete(beside)
	h.delete(machine)

	mustDo(t, h.do(&nvmlsim.RemoveClient{PID: dcgm.PID}))
	mustDo(t, h.do(&nvmlsim.RemoveClient{PID: persistenced.PID}))
	one, two := h.create(namespace, "one", mig, partition(0)), h.create(namespace, "two", mig, partition(0))
	guest := h.create(namespace, "guest", vm, at(1))
	for _, p := range []pod{one, two, guest} {
		p.waitRunning()
	}
	if state := h.state(); len(state.GPUs[0].Instances) != 2 || len(state.GPUs[1].Functions) == 0 {
		t.Errorf("instances %+v, functions %+v", state.GPUs[0].Instances, state.GPUs[1].Functions)
	}

	// A partition that DCGM watches cannot be removed: its pod goes all the same, the other one runs on, and the partition goes with DCGM.
	mustDo(t, h.do(&nvmlsim.AddClient{Client: dcgm}))
	was, logged := two.container(), logSize(t, n.LogFile("agent"))
	h.delete(one)
	h.delete(guest)
	waitDescribedOn(t, heldNode, "GPUsReady", "GPUsOccupied", "its partition 1g.10gb at slice", "is in quarantine")
	if lines := linesSince(t, n.LogFile("agent"), logged, "GPU is in quarantine", "process 4801 (nv-hostengine)"); len(lines) != 1 {
		t.Errorf("the agent's log says %d times who keeps the partition: %q", len(lines), lines)
	}
	if instances := h.state().GPUs[0].Instances; len(instances) != 2 {
		t.Errorf("instances %+v; want both", instances)
	}
	checkSameContainer(t, was, two)
	mustDo(t, h.do(&nvmlsim.RemoveClient{PID: dcgm.PID}))
	// What is owed is tried each minute, and before the next claim.
	poll(t, "the partition is removed", func(context.Context) error {
		if left := len(h.state().GPUs[0].Instances); left != 1 {
			return fmt.Errorf("there are %d", left)
		}
		return nil
	})
	h.delete(two)
	poll(t, "GPUs 0 and 1 are as they were", func(context.Context) error {
		state := h.state()
		if g := state.GPUs[0]; g.MIG || len(g.Instances) > 0 {
			return fmt.Errorf("MIG of GPU 0 is %t, with %d instances", g.MIG, len(g.Instances))
		}
		if state.GPUs[1].Detached() {
			return errors.New("the driver does not have GPU 1")
		}
		return nil
	})
	for gpu := range 2 {
		mustDo(t, h.alone("reset", func() error { return h.do(&nvmlsim.ResetGPU{GPU: fmt.Sprint(gpu)}) }))
	}
	t.Run("MPS as two users", func(t *testing.T) { (&heldMachine{t, n}).twoUsers(newNamespace(t)) })
}

// alone does what nobody may have the driver open for.
func (h *heldMachine) alone(what string, do func() error) error {
	if err := releaseIn(h.node, "--for="+what); err != nil {
		return err
	}
	return errors.Join(do(), releaseIn(h.node, "--end"))
}

var underMPS = &resourceapi.OpaqueDeviceConfiguration{
	Driver: "gpu.nvidia.com",
	Parameters: runtime.RawExtension{Raw: []byte(`{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig",` +
		`"sharing":{"strategy":"MPS","mpsConfig":{"multiUser":true}}}`)},
}

// twoUsers: two pods of two users, neither of them root, have one claim, whose GPU an MPS daemon serves. Both may use the daemon's
// folders, and the daemon serves both at once.
func (h *heldMachine) twoUsers(namespace string) {
	t := h.t
	_, err := cluster.AdminClient().ResourceV1().ResourceClaims(namespace).Create(t.Context(), &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "both"},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}}},
			Config:   []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: underMPS}}},
		}},
	}, metav1.CreateOptions{})
	mustDo(t, err)
	users := map[pod]int64{
		{t: t, namespace: namespace, name: "ada"}:   1001,
		{t: t, namespace: namespace, name: "grace"}: 1002,
	}
	for p, user := range users {
		h.createUser(namespace, p.name, "both", user)
	}
	pid := uint32(4900)
	for p, user := range users {
		object := p.waitRunning()
		r := p.report(h.node, "main")
		pipes := r.Env["CUDA_MPS_PIPE_DIRECTORY"]
		// A client opens the daemon's pipes, and makes its shared memory.
		if r.User != int(user) || pipes == "" || !strings.HasSuffix(r.Rights[pipes], "x") || r.Rights["/dev/shm"] != "rwx" {
			t.Errorf("pod %s: user %d has the rights %v; want user %d, x in %q and rwx in /dev/shm", p.name, r.User, r.Rights, user, pipes)
		}
		gpus := uuidsOf(r).UnsortedList()
		if len(gpus) != 1 {
			t.Fatalf("pod %s has %v", p.name, gpus)
		}
		pid++
		if err := h.do(&nvmlsim.AddProcess{GPU: gpus[0], Process: nvmlsim.Process{
			PID: pid, Kind: nvmlsim.ProcessMPS, User: uint32(user), Pod: string(object.UID),
		}}); err != nil {
			t.Errorf("pod %s, user %d: %v", p.name, user, err)
		}
	}
	for p := range users {
		p.delete()
	}
	if err := cluster.AdminClient().ResourceV1().ResourceClaims(namespace).Delete(t.Context(), "both", metav1.DeleteOptions{}); err != nil {
		t.Error(err)
	}
}
