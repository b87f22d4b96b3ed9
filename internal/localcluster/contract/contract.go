// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
)

// namespace of all that the contract makes.
const namespace = "default"

// patience is long: what a kubelet is refused it tries again after 60 to 90 s.
const patience = 4 * time.Minute

// Kubelet is one that is asked to keep the contract.
type Kubelet struct {
	// Client may do everything.
	Client kubernetes.Interface
	// Node is the name of its Node.
	Node string
	// Root and CDIRoot are its folders.
	Root, CDIRoot string
	// Image is what containers are to run: it goes on until it is told to end, and with the argument "once" it ends at once.
	Image string
	// Bind sends a pod to the node.
	Bind func(ctx context.Context, pod *corev1.Pod) error
	// Delete deletes a pod as a user does.
	Delete func(ctx context.Context, pod string) error
	// Env are the variables whose names begin with STOWAGE_ that a container of the pod has.
	Env func(ctx context.Context, pod *corev1.Pod, container string) (map[string]string, error)
	// Restart ends the kubelet and starts it again. Pods run on.
	Restart func(ctx context.Context) error
}

// Test asks for all of the contract.
func Test(t *testing.T, k *Kubelet) {
	t.Run("claims", k.claims)
	t.Run("devices of a device plugin", k.devices)
}

// claims are prepared before the first of their pods starts and unprepared after the last one has ended, by the driver that is there.
func (k *Kubelet) claims(t *testing.T) {
	d := &driver{cdiRoot: k.CDIRoot}
	stop := d.start(t, k)
	defer func() { stop() }()

	shared := []string{"one", "two"}
	k.claim(t, "shared", shared)
	first, second := podOf("first"), podOf("second")
	use(first, "all", "shared", "")
	use(first, "part", "shared", "two")
	use(second, "all", "shared", "")
	k.run(t, first, "shared")
	k.run(t, second, "shared")
	k.wantEnv(t, first, "all", map[string]string{"STOWAGE_one": "shared-one", "STOWAGE_two": "shared-two"})
	k.wantEnv(t, first, "part", map[string]string{"STOWAGE_two": "shared-two"})
	k.wantEnv(t, second, "all", map[string]string{"STOWAGE_one": "shared-one", "STOWAGE_two": "shared-two"})
	k.wantResources(t, "first", resources{Claims: []string{"shared: shared-one shared-two"}})
	k.end(t, "first")
	wantCalls(t, d, "shared", "prepare shared")
	k.end(t, "second")
	wantCalls(t, d, "shared", "prepare shared", "unprepare shared")
	k.wantResources(t, "first", resources{})

	// A claim that could not be prepared is unprepared all the same, and its pod has not run.
	d.fail(errBroken)
	k.claim(t, "broken", shared[:1])
	broken := podOf("broken")
	use(broken, "main", "broken", "one")
	k.start(t, broken, "broken")
	k.waitEvent(t, "broken", "FailedPrepareDynamicResources", errBroken.Error())
	k.end(t, "broken")
	wantAtLeast(t, d, "broken", "prepare broken", "unprepare broken")
	d.fail(nil)

	// The driver, and then the kubelet, start again while a pod runs.
	k.claim(t, "before", shared[:1])
	before := podOf("before")
	use(before, "main", "before", "one")
	k.run(t, before, "before")
	stop()
	stop = d.start(t, k)
	k.claim(t, "after", shared[:1])
	after := podOf("after")
	use(after, "main", "after", "one")
	k.run(t, after, "after")
	if err := k.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.claim(t, "later", shared[:1])
	later := podOf("later")
	use(later, "main", "later", "one")
	k.run(t, later, "later")
	for _, pod := range []string{"before", "after", "later"} {
		k.end(t, pod)
		wantAtLeast(t, d, pod, "prepare "+pod, "unprepare "+pod)
	}
}

// devices are allocated when a pod is admitted, its init container's for the next one, too, and are another pod's when it has ended.
func (k *Kubelet) devices(t *testing.T) {
	p := newPlugin("a", "b", "c")
	stop := p.start(t, k, "contract-1.sock")
	defer func() { stop() }()
	k.waitDevices(t, 3, 3)

	first := podOf("first")
	first.Spec.InitContainers = []corev1.Container{containerOf("init", 2)}
	first.Spec.InitContainers[0].Args = []string{"once"}
	first.Spec.Containers = []corev1.Container{containerOf("main", 2)}
	k.run(t, first)
	k.wantEnv(t, first, "init", map[string]string{"STOWAGE_IDS": "b,c"}) // which are preferred
	k.wantEnv(t, first, "main", map[string]string{"STOWAGE_IDS": "b,c"})
	if diff := cmp.Diff([]string{"allocate b,c", "allocate b,c", "start b,c", "start b,c"}, p.since(0)); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
	k.wantResources(t, "first", resources{Devices: []string{"b", "c"}})

	second := podWithDevices("second", 1)
	k.run(t, second)
	k.wantEnv(t, second, "main", map[string]string{"STOWAGE_IDS": "a"})
	k.start(t, podWithDevices("third", 1))
	k.waitPhase(t, "third", corev1.PodFailed)
	k.remove(t, "third")

	// Health, both ways.
	p.set("a", false)
	k.waitDevices(t, 3, 2)
	p.set("a", true)
	k.waitDevices(t, 3, 3)

	// The plugin starts again, at another socket.
	stop()
	k.waitDevices(t, 3, 0)
	stop = p.start(t, k, "contract-2.sock")
	k.waitDevices(t, 3, 3)
	k.end(t, "first")
	seen := len(p.since(0))
	k.run(t, podWithDevices("fourth", 1))
	if diff := cmp.Diff([]string{"allocate c", "start c"}, p.since(seen)); diff != "" {
		t.Errorf("calls for a pod after a restart of the plugin (-want +got):\n%s", diff)
	}

	// The kubelet starts again: it deletes the socket, and knows what its pods have.
	if err := k.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	stop()
	stop = p.start(t, k, "contract-3.sock")
	k.waitDevices(t, 3, 3)
	k.wantResources(t, "second", resources{Devices: []string{"a"}})
	k.run(t, podWithDevices("fifth", 1))
	k.wantResources(t, "fifth", resources{Devices: []string{"b"}})
	for _, pod := range []string{"second", "fourth", "fifth"} {
		k.end(t, pod)
	}
	k.wantResources(t, "second", resources{})
}

// podOf has no container yet.
func podOf(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](1), DNSPolicy: corev1.DNSDefault, AutomountServiceAccountToken: ptr.To(false),
			SchedulerName: "nobody",
		},
	}
}

// containerOf asks for so many devices of the device plugin.
func containerOf(name string, devices int64) corev1.Container {
	return corev1.Container{Name: name, ImagePullPolicy: corev1.PullNever, Resources: corev1.ResourceRequirements{
		Limits:   corev1.ResourceList{resourceName: *resource.NewQuantity(devices, resource.DecimalSI)},
		Requests: corev1.ResourceList{resourceName: *resource.NewQuantity(devices, resource.DecimalSI)},
	}}
}

func podWithDevices(name string, devices int64) *corev1.Pod {
	pod := podOf(name)
	pod.Spec.Containers = []corev1.Container{containerOf("main", devices)}
	return pod
}

// use adds a container that has a request of the claim, or all of it.
func use(pod *corev1.Pod, container, claim, request string) {
	if !slices.ContainsFunc(pod.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.Name == claim }) {
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: claim, ResourceClaimName: ptr.To(claim)})
	}
	pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{
		Name: container, ImagePullPolicy: corev1.PullNever,
		Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: claim, Request: request}}},
	})
}

// claim makes a claim with a device for each request, which has the names of both.
func (k *Kubelet) claim(t *testing.T, name string, requests []string) {
	t.Helper()
	claims := k.Client.ResourceV1().ResourceClaims(namespace)
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name + "-claim")}}
	allocation := &resourceapi.AllocationResult{NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{k.Node}}},
	}}}}
	for _, request := range requests {
		exactly := &resourceapi.ExactDeviceRequest{
			DeviceClassName: driverName, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
		}
		claim.Spec.Devices.Requests = append(claim.Spec.Devices.Requests, resourceapi.DeviceRequest{Name: request, Exactly: exactly})
		allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: request, Driver: driverName, Pool: k.Node, Device: name + "-" + request,
		})
	}
	created, err := claims.Create(t.Context(), claim, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	created.Status.Allocation = allocation
	if _, err := claims.UpdateStatus(t.Context(), created, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// start makes the pod with its claims reserved, as a scheduler does, and sends it to the node.
func (k *Kubelet) start(t *testing.T, pod *corev1.Pod, claims ...string) {
	t.Helper()
	pod.UID = types.UID(pod.Name + "-pod") // where the API server gives none
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			containers[i].Image = k.Image
		}
	}
	created, err := k.Client.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.UID = created.UID
	for _, claim := range claims {
		err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			object, err := k.Client.ResourceV1().ResourceClaims(namespace).Get(t.Context(), claim, metav1.GetOptions{})
			if err != nil {
				return err
			}
			user := resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: pod.Name, UID: pod.UID}
			object.Status.ReservedFor = append(object.Status.ReservedFor, user)
			_, err = k.Client.ResourceV1().ResourceClaims(namespace).UpdateStatus(t.Context(), object, metav1.UpdateOptions{})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := k.Bind(t.Context(), created); err != nil {
		t.Fatal(err)
	}
}

func (k *Kubelet) run(t *testing.T, pod *corev1.Pod, claims ...string) {
	t.Helper()
	k.start(t, pod, claims...)
	k.waitPhase(t, pod.Name, corev1.PodRunning)
}

func (k *Kubelet) waitPhase(t *testing.T, name string, phase corev1.PodPhase) {
	t.Helper()
	eventually(t, func() error {
		pod, err := k.Client.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{})
		if err == nil && pod.Status.Phase != phase {
			err = fmt.Errorf("pod %s is %q (%s %s), want %s", name, pod.Status.Phase, pod.Status.Reason, pod.Status.Message, phase)
		}
		return err
	})
}

// end deletes the pod and waits until it is gone.
func (k *Kubelet) end(t *testing.T, name string) {
	t.Helper()
	if err := k.Delete(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	k.waitGone(t, name)
}

// remove deletes a pod that has ended.
func (k *Kubelet) remove(t *testing.T, name string) {
	t.Helper()
	if err := k.Client.CoreV1().Pods(namespace).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	k.waitGone(t, name)
}

func (k *Kubelet) waitGone(t *testing.T, name string) {
	t.Helper()
	eventually(t, func() error {
		switch _, err := k.Client.CoreV1().Pods(namespace).Get(t.Context(), name, metav1.GetOptions{}); {
		case err == nil:
			return fmt.Errorf("pod %s is not gone", name)
		case !apierrors.IsNotFound(err):
			return fmt.Errorf("asking for pod %s: %w", name, err)
		}
		return nil
	})
}

func (k *Kubelet) waitEvent(t *testing.T, pod, reason, text string) {
	t.Helper()
	eventually(t, func() error {
		events, err := k.Client.CoreV1().Events(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, event := range events.Items {
			if event.InvolvedObject.Name == pod && event.Reason == reason && strings.Contains(event.Message, text) {
				return nil
			}
		}
		return fmt.Errorf("pod %s has no event %s with %q", pod, reason, text)
	})
}

// waitDevices waits until the node's status tells of so many devices of the device plugin.
func (k *Kubelet) waitDevices(t *testing.T, capacity, allocatable int64) {
	t.Helper()
	eventually(t, func() error {
		node, err := k.Client.CoreV1().Nodes().Get(t.Context(), k.Node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		has, can := node.Status.Capacity[resourceName], node.Status.Allocatable[resourceName]
		if has.Value() != capacity || can.Value() != allocatable {
			return fmt.Errorf("the node has %s devices, and %s can be allocated; want %d and %d", has.String(), can.String(), capacity, allocatable)
		}
		return nil
	})
}

func (k *Kubelet) wantEnv(t *testing.T, pod *corev1.Pod, container string, want map[string]string) {
	t.Helper()
	var got map[string]string
	eventually(t, func() (err error) {
		got, err = k.Env(t.Context(), pod, container)
		return err
	})
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("variables of container %s of pod %s (-want +got):\n%s", container, pod.Name, diff)
	}
}

// wantAtLeast is wantCalls where a call may be made again: one that has failed, and one that a kubelet that starts does not remember.
func wantAtLeast(t *testing.T, d *driver, claim string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, slices.Compact(d.called(claim))); diff != "" {
		t.Errorf("calls of the driver for claim %s, each once (-want +got):\n%s", claim, diff)
	}
}

func wantCalls(t *testing.T, d *driver, claim string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, d.called(claim)); diff != "" {
		t.Errorf("calls of the driver for claim %s (-want +got):\n%s", claim, diff)
	}
}

// eventually tries until there is no error.
func eventually(t *testing.T, try func() error) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
