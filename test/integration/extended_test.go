// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// standsFor makes the world's class stand for an extended resource, and returns the resource's name.
func (w *world) standsFor(class, suffix string) string {
	w.t.Helper()
	name := w.driver + "/" + suffix
	patch := fmt.Appendf(nil, `{"spec":{"extendedResourceName":%q}}`, name)
	_, err := w.client.ResourceV1().DeviceClasses().Patch(w.ctx, class, types.MergePatchType, patch, metav1.PatchOptions{})
	w.must(err, "making class %s stand for %s", class, name)
	return name
}

// asks makes the pod's containers ask for an extended resource, given as "main=2"; other names are added as
// containers: those that begin with "init" as init containers, with "sidecar" as restartable ones.
func asks(extended string, counts ...string) podOption {
	return func(p *v1.Pod) {
		for _, count := range counts {
			name, n, _ := strings.Cut(count, "=")
			quantity := v1.ResourceList{v1.ResourceName(extended): resource.MustParse(n)}
			container := containerOf(p, name)
			if container.Resources.Limits == nil {
				container.Resources.Limits = v1.ResourceList{}
			}
			container.Resources.Limits[v1.ResourceName(extended)] = quantity[v1.ResourceName(extended)]
		}
	}
}

// containerOf returns the pod's container of the name, which is added if need be.
func containerOf(p *v1.Pod, name string) *v1.Container {
	for _, containers := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range containers {
			if containers[i].Name == name {
				return &containers[i]
			}
		}
	}
	container := v1.Container{Name: name, Image: p.Spec.Containers[0].Image}
	switch {
	case strings.HasPrefix(name, "sidecar"):
		container.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
		fallthrough
	case strings.HasPrefix(name, "init"):
		p.Spec.InitContainers = append(p.Spec.InitContainers, container)
		return &p.Spec.InitContainers[len(p.Spec.InitContainers)-1]
	}
	p.Spec.Containers = append(p.Spec.Containers, container)
	return &p.Spec.Containers[len(p.Spec.Containers)-1]
}

// extendedClaim returns the claim that the bound pod's status names. The pod must own it, and it must be the only one.
func (w *world) extendedClaim(pod *v1.Pod) *resourceapi.ResourceClaim {
	w.t.Helper()
	status := pod.Status.ExtendedResourceClaimStatus
	if status == nil {
		w.t.Fatalf("the status of pod %s names no claim for its extended resources", pod.Name)
	}
	claim := w.claim(status.ResourceClaimName)
	if !metav1.IsControlledBy(claim, pod) || claim.Annotations[resourceapi.ExtendedResourceClaimAnnotation] != "true" {
		w.t.Errorf("claim %s has owners %v and annotations %v", claim.Name, claim.OwnerReferences, claim.Annotations)
	}
	if users := claim.Status.ReservedFor; len(users) != 1 || users[0].UID != pod.UID {
		w.t.Errorf("claim %s is reserved for %v, want pod %s alone", claim.Name, users, pod.Name)
	}
	if n := w.claimsOf(pod); n != 1 {
		w.t.Errorf("pod %s owns %d claims, want 1", pod.Name, n)
	}
	return claim
}

// claimsOf is how many claims the pod owns.
func (w *world) claimsOf(pod *v1.Pod) int {
	w.t.Helper()
	list, err := w.client.ResourceV1().ResourceClaims(w.name).List(w.ctx, metav1.ListOptions{})
	w.must(err, "listing claims")
	n := 0
	for i := range list.Items {
		if metav1.IsControlledBy(&list.Items[i], pod) {
			n++
		}
	}
	return n
}

// sees are the devices that each container of the pod gets by the mappings in the pod's status, as the kubelet
// resolves them.
func sees(pod *v1.Pod, claim *resourceapi.ResourceClaim) map[string]string {
	seen := map[string][]string{}
	for _, m := range pod.Status.ExtendedResourceClaimStatus.RequestMappings {
		for _, r := range claim.Status.Allocation.Devices.Results {
			if r.Request == m.RequestName {
				seen[m.ContainerName] = append(seen[m.ContainerName], r.Device)
			}
		}
	}
	joined := map[string]string{}
	for name, devices := range seen {
		joined[name] = strings.Join(devices, " ")
	}
	return joined
}

// Which containers get which devices, and how many the pod holds: as many as it would from a device plugin.
func TestExtendedResource(t *testing.T) {
	t.Parallel()
	s := startScheduler(t, "extended", schedulerSetup{})
	tests := map[string]struct {
		implicit bool // deviceclass.resource.kubernetes.io/<class>, without a name in the class
		asks     []string
		held     int
		sees     map[string]string
	}{
		"explicit name":        {asks: []string{"main=1"}, held: 1, sees: map[string]string{"main": "gpu-0"}},
		"implicit name":        {implicit: true, asks: []string{"main=2"}, held: 2, sees: map[string]string{"main": "gpu-0 gpu-1"}},
		"two app containers":   {asks: []string{"main=2", "second=1"}, held: 3, sees: map[string]string{"main": "gpu-0 gpu-1", "second": "gpu-2"}},
		"init 4 and app 4":     {asks: []string{"init=4", "main=4"}, held: 4, sees: map[string]string{"init": "gpu-0 gpu-1 gpu-2 gpu-3", "main": "gpu-0 gpu-1 gpu-2 gpu-3"}},
		"init 4 and app 2":     {asks: []string{"init=4", "main=2"}, held: 4, sees: map[string]string{"init": "gpu-0 gpu-1 gpu-2 gpu-3", "main": "gpu-0 gpu-1"}},
		"init 1 and app 3":     {asks: []string{"init=1", "main=3"}, held: 3, sees: map[string]string{"init": "gpu-0", "main": "gpu-0 gpu-1 gpu-2"}},
		"two init containers":  {asks: []string{"init-1=2", "init-2=3", "main=1"}, held: 3, sees: map[string]string{"init-1": "gpu-0 gpu-1", "init-2": "gpu-0 gpu-1 gpu-2", "main": "gpu-0"}},
		"sidecar and app":      {asks: []string{"sidecar=2", "main=2"}, held: 4, sees: map[string]string{"sidecar": "gpu-2 gpu-3", "main": "gpu-0 gpu-1"}},
		"init before sidecar":  {asks: []string{"init=3", "sidecar=1", "main=2"}, held: 3, sees: map[string]string{"init": "gpu-0 gpu-1 gpu-2", "sidecar": "gpu-2", "main": "gpu-0 gpu-1"}},
		"init after a sidecar": {asks: []string{"sidecar=1", "init=3", "main=2"}, held: 4, sees: map[string]string{"sidecar": "gpu-2", "init": "gpu-0 gpu-1 gpu-3", "main": "gpu-0 gpu-1"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, s)
			w.addNode("a", gpus(h100, 4)...)
			extended := resourceapi.ResourceDeviceClassPrefix + w.class
			if !test.implicit {
				extended = w.standsFor(w.class, "gpu")
			}
			w.addPod("pod", asks(extended, test.asks...))
			pod := w.awaitBoundTo("pod", "a")
			claim := w.extendedClaim(pod)
			if got := len(devices(claim)); got != test.held {
				t.Errorf("the pod holds %d devices, want %d", got, test.held)
			}
			if diff := cmp.Diff(test.sees, sees(pod, claim)); diff != "" {
				t.Errorf("devices of the containers (-want +got):\n%s", diff)
			}
		})
	}
}

// Two resources in two containers, of which a device plugin provides one: the claim is for the other one only.
func TestExtendedResourcesOfSeveralClassesAndADevicePlugin(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", append(gpus(h100, 2), rename(gpus(a100, 2), "ampere")...)...)
	w.addClass(w.name+"-hopper", `device.driver == "$DRIVER"`, byProduct(h100))
	w.addClass(w.name+"-ampere", `device.driver == "$DRIVER"`, byProduct(a100))
	hopper, ampere := w.standsFor(w.name+"-hopper", "hopper"), w.standsFor(w.name+"-ampere", "ampere")
	w.addClass(w.name+"-nic", `device.driver == "none"`)
	nic := w.standsFor(w.name+"-nic", "nic")
	w.providesByPlugin("a", nic, 2)

	w.addPod("pod", asks(hopper, "main=1", "init=2"), asks(ampere, "main=2", "second=0"), asks(nic, "main=1"))
	pod := w.awaitBoundTo("pod", "a")
	want := map[string]string{"init": "gpu-0 gpu-1", "main": "ampere-0 ampere-1 gpu-0"}
	if diff := cmp.Diff(want, sees(pod, w.extendedClaim(pod))); diff != "" {
		t.Errorf("devices of the containers (-want +got):\n%s", diff)
	}
	w.addPod("second", asks(nic, "main=2")) // one is taken
	w.awaitUnschedulable("second", "Insufficient "+nic)
}

// providesByPlugin reports a node's extended resource, as its kubelet does for a device plugin.
func (w *world) providesByPlugin(nodeSuffix, extended string, n int) {
	w.t.Helper()
	patch := fmt.Appendf(nil, `{"status":{"capacity":{%q:"%d"},"allocatable":{%q:"%d"}}}`, extended, n, extended, n)
	_, err := w.client.CoreV1().Nodes().Patch(w.ctx, w.nodeName(nodeSuffix), types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	w.must(err, "giving node %s %d of %s", nodeSuffix, n, extended)
}

// One name, and nodes of both kinds: the pod needs a claim only on the one kind.
func TestDevicePluginNodesBesideClaimNodes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	extended := w.standsFor(w.class, "gpu")
	w.addNode("plugin")
	w.providesByPlugin("plugin", extended, 4)
	w.addNode("claims", gpus(h100, 4)...)

	w.addPod("on-plugin", asks(extended, "main=3"), w.onNode("plugin"))
	pod := w.awaitBoundTo("on-plugin", "plugin")
	if status := pod.Status.ExtendedResourceClaimStatus; status != nil || w.claimsOf(pod) != 0 {
		t.Errorf("a pod of a device plugin has %d claims and the status %v", w.claimsOf(pod), status)
	}
	w.addPod("on-claims", asks(extended, "main=3"), w.onNode("claims"))
	if claim := w.extendedClaim(w.awaitBoundTo("on-claims", "claims")); len(devices(claim)) != 3 {
		t.Errorf("want 3 devices: %s", describe(claim))
	}
	// One is left on each, and neither kind takes the other one's.
	w.addPod("left-1", asks(extended, "main=1"))
	w.addPod("left-2", asks(extended, "main=1"))
	one, two := w.awaitBound("left-1"), w.awaitBound("left-2")
	if one.Spec.NodeName == two.Spec.NodeName {
		t.Errorf("both pods are on node %s, which has one left", one.Spec.NodeName)
	}
	w.addPod("too-many", asks(extended, "main=1"))
	w.awaitUnschedulable("too-many", "Insufficient "+extended, "held")
	w.deletePod("on-claims")
	w.awaitBoundTo("too-many", "claims")
}

// A node's device plugin goes and a DRA driver comes, while a pod runs and one waits; and back.
func TestNodeTurnsFromADevicePluginToClaims(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	extended := w.standsFor(w.class, "gpu")
	w.addNode("a")
	w.providesByPlugin("a", extended, 4)
	w.addPod("running", asks(extended, "main=3"))
	w.awaitBoundTo("running", "a")
	w.addPod("waiting", asks(extended, "main=2"))
	w.awaitUnschedulable("waiting", "Insufficient "+extended)

	// Nobody knows which three devices the running pod has.
	w.providesByPlugin("a", extended, 0)
	w.addSlice(w.slice("a", gpus(h100, 4)...))
	w.awaitUnschedulable("waiting", "device plugin no longer provides")
	w.deletePod("running")
	pod := w.awaitBoundTo("waiting", "a")
	if claim := w.extendedClaim(pod); len(devices(claim)) != 2 {
		t.Errorf("want 2 devices: %s", describe(claim))
	}

	// Back: the pod with a claim counts against what the device plugin has.
	w.must(w.client.ResourceV1().ResourceSlices().Delete(w.ctx, w.nodeName("a"), metav1.DeleteOptions{}), "deleting the slice")
	w.addPod("again", asks(extended, "main=3"))
	w.awaitUnschedulable("again")
	w.providesByPlugin("a", extended, 4)
	w.awaitUnschedulable("again", "Insufficient "+extended)
	w.addPod("fits", asks(extended, "main=2"))
	fits := w.awaitBoundTo("fits", "a")
	if fits.Status.ExtendedResourceClaimStatus != nil || w.claimsOf(fits) != 0 {
		t.Errorf("a pod of a device plugin has a claim: %v", fits.Status.ExtendedResourceClaimStatus)
	}
	w.deletePod("fits")
	w.deletePod("waiting")
	w.awaitBoundTo("again", "a")
}

// A class begins to stand for a resource that a pod waits for, and its devices come later still.
func TestPodWaitsForTheClassOfItsExtendedResource(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a")
	w.addPod("pod", asks(w.driver+"/gpu", "main=1"))
	w.awaitUnschedulable("pod", "Insufficient "+w.driver+"/gpu")
	w.standsFor(w.class, "gpu")
	w.awaitUnschedulable("pod", w.class)
	w.addSlice(w.slice("a", gpus(h100, 1)...))
	w.extendedClaim(w.awaitBoundTo("pod", "a"))
}

// Waiting pods say what is missing, and follow as others end.
func TestExtendedResourcePodIsExplainedAndWoken(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	extended := w.standsFor(w.class, "gpu")
	w.addNode("a", gpus(h100, 4)...)
	w.addPod("first", asks(extended, "init=4", "main=4"))
	first := w.awaitBoundTo("first", "a")
	w.addPod("second", asks(extended, "main=1"))
	pod := w.awaitUnschedulable("second", "4 of 4 "+w.class+" devices held", w.extendedClaim(first).Name)
	w.awaitEvent(pod, "4 of 4 "+w.class+" devices held")
	if n := w.claimsOf(pod); n != 0 {
		t.Errorf("a pod that waits has %d claims", n)
	}
	w.endPod(first)
	w.extendedClaim(w.awaitBoundTo("second", "a"))
	w.awaitClaimGone(first.Status.ExtendedResourceClaimStatus.ResourceClaimName)
}

// A pod's claim of its own and its extended resource come from one node, and never share a device.
func TestExtendedResourceBesideAClaim(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	extended := w.standsFor(w.class, "gpu")
	w.addNode("small", gpus(h100, 2)...)
	w.addNode("big", gpus(h100, 3)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	w.addPod("pod", withTemplate("one"), asks(extended, "main=2"))
	pod := w.awaitBoundTo("pod", "big")
	status := pod.Status.ExtendedResourceClaimStatus
	if status == nil {
		t.Fatal("the pod's status names no claim for its extended resources")
	}
	got := append(devices(w.claim(claimName(pod, "one"))), devices(w.claim(status.ResourceClaimName))...)
	if diff := cmp.Diff([]string{"gpu-0", "gpu-1", "gpu-2"}, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// Quota counts the devices of the pod once, not again for the claim: it knows the claim by annotation and owner.
func TestExtendedResourceAndQuota(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	extended := w.standsFor(w.class, "gpu")
	w.addNode("a", gpus(h100, 4)...)
	counted := v1.ResourceName("requests." + extended)
	_, err := w.client.CoreV1().ResourceQuotas(w.name).Create(w.ctx, &v1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Name: "quota"},
		Spec:       v1.ResourceQuotaSpec{Hard: v1.ResourceList{counted: resource.MustParse("4")}},
	}, metav1.CreateOptions{})
	w.must(err, "creating a quota")
	await(w, "the quota to be in effect", w.quotaList(), func(q *v1.ResourceQuota) bool { return len(q.Status.Hard) == 1 })
	w.addPod("pod", asks(extended, "init=4", "main=4"))
	w.extendedClaim(w.awaitBoundTo("pod", "a"))
}

// What needs more devices than one claim can get is refused on such nodes, and says so.
func TestMoreExtendedResourcesThanOneClaimCanGet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	extended := w.standsFor(w.class, "gpu")
	w.addNode("a", gpus(h100, 40)...)
	w.addPod("pod", asks(extended, "main="+strconv.Itoa(resourceapi.AllocationResultsMaxSize), "second=1"))
	w.awaitUnschedulable("pod", "33 devices", "can get 32")
	w.addPod("largest", asks(extended, "main="+strconv.Itoa(resourceapi.AllocationResultsMaxSize)))
	if claim := w.extendedClaim(w.awaitBoundTo("largest", "a")); len(devices(claim)) != 32 {
		t.Errorf("%d devices, want 32", len(devices(claim)))
	}
}
