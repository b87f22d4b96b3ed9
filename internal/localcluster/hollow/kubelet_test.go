// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/ptr"
)

// world is a hollow kubelet, a plugin and an API that remembers.
type world struct {
	t       *testing.T
	ctx     context.Context
	client  *fake.Clientset
	plugin  *fakePlugin
	kubelet *Kubelet
	options Options
}

// newWorld starts a kubelet without a plugin.
func newWorld(t *testing.T) *world {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	root, err := os.MkdirTemp("", "hollow") // t.TempDir would be too long for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	client := fake.NewSimpleClientset()
	client.PrependReactor("update", "pods", keepDeletion(client.Tracker()))
	w := &world{
		t: t, ctx: ctx, client: client,
		options: Options{Name: "node", Root: root, CDIRoot: filepath.Join(root, "cdi")},
	}
	w.plugin = &fakePlugin{root: root, cdiRoot: w.options.CDIRoot, prepared: map[types.UID]bool{}}
	w.startKubelet()
	t.Cleanup(w.stopKubelet)
	return w
}

// keepDeletion makes the fake client keep a pod's deletion when its status is written from an older object, as
// API servers do. The client calls reactors one at a time.
func keepDeletion(tracker clienttesting.ObjectTracker) clienttesting.ReactionFunc {
	return func(action clienttesting.Action) (bool, runtime.Object, error) {
		update := action.(clienttesting.UpdateAction)
		written, ok := update.GetObject().(*corev1.Pod)
		if !ok || update.GetSubresource() != "status" {
			return false, nil, nil
		}
		object, err := tracker.Get(update.GetResource(), written.Namespace, written.Name)
		if err != nil {
			return true, nil, err
		}
		known := object.(*corev1.Pod)
		written.DeletionTimestamp, written.DeletionGracePeriodSeconds = known.DeletionTimestamp, known.DeletionGracePeriodSeconds
		return false, nil, nil
	}
}

func (w *world) startKubelet() {
	w.t.Helper()
	var err error
	if w.kubelet, err = start(w.ctx, w.client, w.options); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) stopKubelet() {
	w.t.Helper()
	if err := w.kubelet.Stop(); err != nil {
		w.t.Error(err)
	}
}

func (w *world) startPlugin() {
	w.t.Helper()
	w.t.Cleanup(w.plugin.start(w.t, w.client))
}

// claim makes a claim with one allocated device for each request, named after it and reserved for the pods.
func (w *world) claim(name string, requests []string, pods ...string) {
	w.t.Helper()
	claim := &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid")},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
	for _, request := range requests {
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: request, Driver: driverName, Pool: "node", Device: name + "-" + request,
		})
	}
	for _, pod := range pods {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
			Resource: "pods", Name: pod, UID: types.UID(pod + "-uid"),
		})
	}
	if _, err := w.client.ResourceV1().ResourceClaims("default").Create(w.ctx, claim, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// pod makes a pod with one container for each use, which is "claim" or "claim/request".
func (w *world) pod(name string, uses ...string) *corev1.Pod {
	w.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid")},
		Spec:       corev1.PodSpec{NodeName: "node"},
	}
	for i, use := range uses {
		claim, request, _ := strings.Cut(use, "/")
		if !slices.ContainsFunc(pod.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.Name == claim }) {
			pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: claim, ResourceClaimName: ptr.To(claim)})
		}
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{
			Name:      fmt.Sprintf("c%d", i),
			Resources: corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: claim, Request: request}}},
		})
	}
	return w.create(pod)
}

func (w *world) create(pod *corev1.Pod) *corev1.Pod {
	w.t.Helper()
	pod, err := w.client.CoreV1().Pods("default").Create(w.ctx, pod, metav1.CreateOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return pod
}

// delete does what the API server does when a user deletes a pod that runs.
func (w *world) delete(name string) {
	w.t.Helper()
	eventually(w.t, func() error {
		pod, err := w.client.CoreV1().Pods("default").Get(w.ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = ptr.To(metav1.Now()), ptr.To[int64](30)
		_, err = w.client.CoreV1().Pods("default").Update(w.ctx, pod, metav1.UpdateOptions{})
		return err
	})
}

func (w *world) waitRunning(names ...string) {
	w.t.Helper()
	for _, name := range names {
		eventually(w.t, func() error {
			pod, err := w.client.CoreV1().Pods("default").Get(w.ctx, name, metav1.GetOptions{})
			if err == nil && pod.Status.Phase != corev1.PodRunning {
				err = fmt.Errorf("pod %s is %q", name, pod.Status.Phase)
			}
			return err
		})
	}
}

func (w *world) waitGone(name string) {
	w.t.Helper()
	eventually(w.t, func() error {
		switch _, err := w.client.CoreV1().Pods("default").Get(w.ctx, name, metav1.GetOptions{}); {
		case err == nil:
			return fmt.Errorf("pod %s is still there", name)
		case !apierrors.IsNotFound(err):
			return fmt.Errorf("asking for pod %s: %w", name, err)
		}
		return nil
	})
}

// waitEvent waits for an event of the pod with the text in its message.
func (w *world) waitEvent(pod, text string) {
	w.t.Helper()
	eventually(w.t, func() error {
		events, err := w.client.CoreV1().Events("default").List(w.ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var messages []string
		for _, event := range events.Items {
			if event.InvolvedObject.Name == pod && strings.Contains(event.Message, text) {
				return nil
			}
			messages = append(messages, event.Message)
		}
		return fmt.Errorf("events of pod %s are %q: none says %q", pod, messages, text)
	})
}

func (w *world) waitCalls(want ...string) {
	w.t.Helper()
	eventually(w.t, func() error {
		if diff := cmp.Diff(want, w.plugin.called()); diff != "" {
			return fmt.Errorf("calls of the plugin (-want +got):\n%s", diff)
		}
		return nil
	})
}

func (w *world) wantSeen(pod string, want Pod) {
	w.t.Helper()
	got, ok := w.kubelet.Seen(types.UID(pod + "-uid"))
	if diff := cmp.Diff(want, got); !ok || diff != "" {
		w.t.Errorf("seen by pod %s: %t (-want +got):\n%s", pod, ok, diff)
	}
}

func TestEachContainerSeesTheDevicesOfTheRequestsThatItNames(t *testing.T) {
	w := newWorld(t)
	w.startPlugin()
	w.claim("a", []string{"one", "two"}, "pod")
	w.pod("pod", "a", "a/two")
	w.waitRunning("pod")
	w.wantSeen("pod", Pod{Namespace: "default", Name: "pod", Containers: []Container{
		{
			Name:       "c0",
			CDIDevices: []string{"example.com/gpu=a-uid-a-one", "example.com/gpu=a-uid-a-two"},
			Env:        []string{"GPU_one=a-one", "GPU_two=a-two"},
			Devices:    []Device{{Path: "/dev/a-one", Type: "c", Major: 240}, {Path: "/dev/a-two", Type: "c", Major: 240, Minor: 1}},
		},
		{
			Name:       "c1",
			CDIDevices: []string{"example.com/gpu=a-uid-a-two"},
			Env:        []string{"GPU_two=a-two"},
			Devices:    []Device{{Path: "/dev/a-two", Type: "c", Major: 240, Minor: 1}},
		},
	}})
}

func TestADeletedPodIsUnpreparedReportedAndThenRemoved(t *testing.T) {
	w := newWorld(t)
	w.startPlugin()
	w.claim("a", []string{"one"}, "pod")
	w.pod("pod", "a")
	w.waitRunning("pod")
	w.delete("pod")
	w.waitGone("pod")
	w.waitCalls("prepare a", "unprepare a")
	if _, ok := w.kubelet.Seen("pod-uid"); ok {
		t.Error("the pod is still seen")
	}
	var last *corev1.Pod
	for _, action := range w.client.Actions() {
		if update, ok := action.(clienttesting.UpdateAction); ok && update.GetSubresource() == "status" {
			if pod, ok := update.GetObject().(*corev1.Pod); ok {
				last = pod
			}
		}
		if remove, ok := action.(clienttesting.DeleteAction); ok {
			options := remove.GetDeleteOptions()
			if ptr.Deref(options.GracePeriodSeconds, -1) != 0 || string(ptr.Deref(options.Preconditions.UID, "")) != "pod-uid" {
				t.Errorf("the pod was removed with %+v, want no grace and its UID", options)
			}
		}
	}
	if last.Status.Phase != corev1.PodSucceeded || last.Status.ContainerStatuses[0].State.Terminated == nil {
		t.Errorf("last status: got %+v, want Succeeded with a terminated container", last.Status)
	}
}

func TestASharedClaimIsUnpreparedWithItsLastPod(t *testing.T) {
	w := newWorld(t)
	w.startPlugin()
	w.claim("shared", []string{"one"}, "first", "second")
	w.pod("first", "shared")
	w.waitRunning("first")
	w.pod("second", "shared")
	w.waitRunning("second")
	w.delete("first")
	w.waitGone("first")
	w.waitCalls("prepare shared")
	w.delete("second")
	w.waitGone("second")
	w.waitCalls("prepare shared", "unprepare shared")
}

func TestAPodWaitsForItsPlugin(t *testing.T) {
	w := newWorld(t)
	w.claim("a", []string{"one"}, "pod")
	w.pod("pod", "a")
	w.waitEvent("pod", "driver gpu.example.com: no plugin of the DRA driver is registered")
	w.startPlugin()
	w.waitRunning("pod")
}

func TestAPodThatNeverReachedAPluginIsDeletedWithoutOne(t *testing.T) {
	w := newWorld(t)
	w.claim("a", []string{"one"}, "pod")
	w.pod("pod", "a")
	w.waitEvent("pod", "no plugin of the DRA driver is registered")
	w.delete("pod")
	w.waitGone("pod")
}

func TestAPluginThatComesBackIsUsedAgain(t *testing.T) {
	w := newWorld(t)
	stop := w.plugin.start(t, w.client)
	w.claim("a", []string{"one"}, "before")
	w.pod("before", "a")
	w.waitRunning("before")
	stop()
	w.startPlugin()
	w.claim("b", []string{"one"}, "after")
	w.pod("after", "b")
	w.waitRunning("after")
	w.delete("before")
	w.waitGone("before")
	w.waitCalls("prepare a", "prepare b", "unprepare a")
}

func TestAFailedPrepareIsToldTriedAgainAndUndone(t *testing.T) {
	w := newWorld(t)
	w.startPlugin()
	w.plugin.setFailure(errBroken)
	w.claim("a", []string{"one"}, "recovers")
	w.claim("b", []string{"one"}, "deleted")
	w.pod("recovers", "a")
	w.waitEvent("recovers", "Failed to prepare dynamic resources: preparing ResourceClaim a: ")
	w.waitEvent("recovers", errBroken.Error())
	w.pod("deleted", "b")
	w.waitEvent("deleted", errBroken.Error())
	w.plugin.setFailure(nil)
	w.waitRunning("recovers")

	// The second one is deleted however far its preparing has come by now.
	w.delete("deleted")
	w.waitGone("deleted")
	if calls := w.plugin.called(); !slices.Contains(calls, "unprepare b") {
		t.Errorf("calls of the plugin: got %v, want one to unprepare b", calls)
	}
}

func TestAPodIsNotRemovedWhileUnprepareFails(t *testing.T) {
	w := newWorld(t)
	w.startPlugin()
	w.claim("a", []string{"one"}, "pod")
	w.pod("pod", "a")
	w.waitRunning("pod")
	w.plugin.setFailure(errBroken)
	w.delete("pod")
	eventually(t, func() error {
		if calls := w.plugin.called(); len(calls) < 4 {
			return fmt.Errorf("calls: %v: want one prepare and three unprepares", calls)
		}
		return nil
	})
	if _, err := w.client.CoreV1().Pods("default").Get(w.ctx, "pod", metav1.GetOptions{}); err != nil {
		t.Errorf("the pod is gone although its claim is still prepared: %v", err)
	}
	w.plugin.setFailure(nil)
	w.waitGone("pod")
}

func TestAClaimThatIsNotThePodsIsNotPrepared(t *testing.T) {
	for _, test := range []struct {
		name  string
		claim func(w *world)
		event string
	}{
		{name: "it does not exist", claim: func(*world) {}, event: `"a" not found`},
		{name: "it is reserved for another pod", claim: func(w *world) { w.claim("a", []string{"one"}, "other") }, event: "not reserved for pod pod"},
		{
			name: "it is not allocated",
			claim: func(w *world) {
				w.claim("a", nil, "pod")
				claim, err := w.client.ResourceV1().ResourceClaims("default").Get(w.ctx, "a", metav1.GetOptions{})
				if err != nil {
					w.t.Fatal(err)
				}
				claim.Status.Allocation = nil
				if _, err := w.client.ResourceV1().ResourceClaims("default").Update(w.ctx, claim, metav1.UpdateOptions{}); err != nil {
					w.t.Fatal(err)
				}
			},
			event: "is not allocated",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			w.startPlugin()
			test.claim(w)
			w.pod("pod", "a")
			w.waitEvent("pod", test.event)
			if calls := w.plugin.called(); len(calls) != 0 {
				t.Errorf("the plugin was called: %v", calls)
			}
		})
	}
}

func TestAPodWhoseCDIDeviceIsNotDefinedDoesNotRun(t *testing.T) {
	w := newWorld(t)
	w.startPlugin()
	w.plugin.noCDI = true
	w.claim("a", []string{"one"}, "pod")
	w.pod("pod", "a")
	w.waitEvent("pod", "CDI devices [example.com/gpu=a-uid-a-one] of container c0")
	if _, ok := w.kubelet.Seen("pod-uid"); ok {
		t.Error("the pod runs")
	}
}

func TestAPodThatVanishesIsUnprepared(t *testing.T) {
	w := newWorld(t)
	w.startPlugin()
	w.claim("a", []string{"one"}, "pod")
	w.pod("pod", "a")
	w.waitRunning("pod")
	if err := w.client.CoreV1().Pods("default").Delete(w.ctx, "pod", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.waitCalls("prepare a", "unprepare a")
}

func TestARestartedKubeletTakesItsPodsOverAndWipesItsSlices(t *testing.T) {
	w := newWorld(t)
	w.startPlugin()
	w.claim("a", []string{"one"}, "pod")
	w.pod("pod", "a")
	w.waitRunning("pod")
	w.stopKubelet()
	w.client.ClearActions()
	w.startKubelet()
	eventually(t, func() error {
		if _, ok := w.kubelet.Seen("pod-uid"); !ok {
			return fmt.Errorf("the pod is not seen by the new kubelet")
		}
		return nil
	})
	i := slices.IndexFunc(w.client.Actions(), func(a clienttesting.Action) bool { return a.GetVerb() == "delete-collection" })
	if i < 0 {
		t.Fatal("the node's ResourceSlices were not deleted")
	}
	selector := w.client.Actions()[i].(clienttesting.DeleteCollectionAction).GetListRestrictions().Fields.String()
	if want := "spec.nodeName=node"; selector != want {
		t.Errorf("ResourceSlices were deleted by %q, want %q", selector, want)
	}
	w.delete("pod")
	w.waitGone("pod")
	w.waitCalls("prepare a", "prepare a", "unprepare a")
}

func TestTheClaimOfExtendedResourcesReachesTheContainersThatAskedForThem(t *testing.T) {
	w := newWorld(t)
	w.startPlugin()
	w.claim("extended", []string{"request-0"}, "pod")
	w.create(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "pod", UID: "pod-uid"},
		Spec:       corev1.PodSpec{NodeName: "node", Containers: []corev1.Container{{Name: "with"}, {Name: "without"}}},
		Status: corev1.PodStatus{ExtendedResourceClaimStatus: &corev1.PodExtendedResourceClaimStatus{
			ResourceClaimName: "extended",
			RequestMappings:   []corev1.ContainerExtendedResourceRequest{{ContainerName: "with", ResourceName: "example.com/gpu", RequestName: "request-0"}},
		}},
	})
	w.waitRunning("pod")
	w.wantSeen("pod", Pod{Namespace: "default", Name: "pod", Containers: []Container{
		{
			Name:       "with",
			CDIDevices: []string{"example.com/gpu=extended-uid-extended-request-0"},
			Env:        []string{"GPU_request-0=extended-request-0"},
			Devices:    []Device{{Path: "/dev/extended-request-0", Type: "c", Major: 240}},
		},
		{Name: "without"},
	}})
}

func TestTheNodeIsRegisteredReadyWithALease(t *testing.T) {
	w := newWorld(t)
	node, err := w.client.CoreV1().Nodes().Get(w.ctx, "node", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}) {
		t.Errorf("conditions: got %+v, want Ready", node.Status.Conditions)
	}
	eventually(t, func() error {
		lease, err := w.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(w.ctx, "node", metav1.GetOptions{})
		if err == nil && ptr.Deref(lease.Spec.HolderIdentity, "") != "node" {
			err = fmt.Errorf("holder of the lease: %v", lease.Spec.HolderIdentity)
		}
		return err
	})
}
