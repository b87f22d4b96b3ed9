// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/twopaths"
	"stowage.dev/stowage/pkg/wakeup"
)

const gpuResource, nicResource = v1.ResourceName("example.com/gpu"), v1.ResourceName("example.com/nic")

// What a pod is told of nodes that are refused for its extended resources.
const (
	toldClassGone     = "node(s) without a device plugin for an extended resource whose device class is gone"
	toldPluginLeaving = "node(s) where pods still hold devices of an extended resource that the device plugin no longer provides"
	toldClaimRecorded = "node(s) whose device plugin provides the extended resources, for which the pod's status already names a claim"
	toldUnseen        = "node(s) where pods have devices from a device plugin, and the node's agent has not told yet which these are"
	toldGivenToClaims = "node(s) where claims have devices that the device plugin may give to the pod, too"
)

// containersPod has containers given as "name=gpus"; init containers begin with "i".
func containersPod(containers ...string) *v1.Pod {
	p := &v1.Pod{ObjectMeta: meta("p")}
	for _, container := range containers {
		name, gpus, _ := strings.Cut(container, "=")
		c := v1.Container{Name: name, Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
			v1.ResourceCPU: resource.MustParse("1"), gpuResource: resource.MustParse(gpus),
		}}}
		if name[0] == 'i' {
			p.Spec.InitContainers = append(p.Spec.InitContainers, c)
		} else {
			p.Spec.Containers = append(p.Spec.Containers, c)
		}
	}
	return p
}

// extendedWorld has node-a with one GPU and node-b with two, for claims; the class stands for gpuResource.
func extendedWorld(pods ...*v1.Pod) world {
	w := twoNodes()
	w.resolver = map[v1.ResourceName]string{gpuResource: testClass}
	w.pods = pods
	return w
}

// extendedClaims returns the claims for extended resources that exist, by name.
func (h *harness) extendedClaims() []*resourceapi.ResourceClaim {
	h.api.mutex.Lock()
	defer h.api.mutex.Unlock()
	var found []*resourceapi.ResourceClaim
	for _, c := range h.api.claims {
		if c.Annotations[resourceapi.ExtendedResourceClaimAnnotation] == "true" {
			found = append(found, c.DeepCopy())
		}
	}
	slices.SortFunc(found, func(a, b *resourceapi.ResourceClaim) int { return strings.Compare(a.Name, b.Name) })
	return found
}

// stored returns the pod as the API has it.
func (h *harness) stored(name string) *v1.Pod {
	h.t.Helper()
	p, err := h.client.CoreV1().Pods(testNamespace).Get(h.ctx, name, metav1.GetOptions{})
	if err != nil {
		h.t.Fatal(err)
	}
	return p
}

// held returns how many devices are held now, in flight or not.
func (h *harness) held() int { return h.plugin.shared.account.Tracker.Snapshot().Usage.Len() }

// Each attempt to make a claim that is refused has the same text, so that the pod's events count it.
func TestTheTextOfAClaimThatCannotBeMadeStaysTheSame(t *testing.T) {
	p := containersPod("a=1")
	h := newHarness(t, extendedWorld(p))
	h.api.onRequest(func(request string) error {
		if request == "create/" {
			return apierrors.NewForbidden(resourceapi.Resource("resourceclaims"), "", errors.New("no right"))
		}
		return nil
	})
	var texts []string
	for range 2 {
		a := h.filterAll(p).reserve("node-b")
		texts = append(texts, a.preBind("node-b").Message())
		a.unreserve("node-b")
	}
	want := `create the claim for the pod's extended resources: resourceclaims.resource.k8s.io is forbidden: no right`
	if diff := cmp.Diff([]string{want, want}, texts); diff != "" {
		t.Errorf("texts (-want +got):\n%s", diff)
	}
}

// The claim is made, allocated and reserved, and then the pod's status names it, in that order.
func TestExtendedResourceIsBound(t *testing.T) {
	p := containersPod("i=2", "a=2")
	h := newHarness(t, extendedWorld(p))
	var recordedAfter []string
	h.client.PrependReactor("patch", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		recordedAfter = h.api.written()
		return false, nil, nil
	})
	a := h.filterAll(p)
	if diff := cmp.Diff([]string{"node-b"}, a.fits()); diff != "" {
		t.Fatalf("nodes (-want +got):\n%s", diff)
	}
	a.bind("node-b")

	claims := h.extendedClaims()
	if len(claims) != 1 {
		t.Fatalf("%d claims, want 1", len(claims))
	}
	c := claims[0]
	if want := []string{"create/ " + c.Name, "update/ " + c.Name, "update/status " + c.Name}; !slices.Equal(recordedAfter, want) {
		t.Errorf("writes before the pod's status: %q, want %q", recordedAfter, want)
	}
	if !strings.HasPrefix(c.Name, "p-extended-resources-") || !metav1.IsControlledBy(c, p) || c.OwnerReferences[0].Kind != "Pod" {
		t.Errorf("claim %s with owners %v", c.Name, c.OwnerReferences)
	}
	if diff := cmp.Diff([]string{"gpu-0", "gpu-1"}, devicesOf(c)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"p"}, usersOf(c)); diff != "" {
		t.Errorf("users (-want +got):\n%s", diff)
	}
	want := &v1.PodExtendedResourceClaimStatus{ResourceClaimName: c.Name, RequestMappings: []v1.ContainerExtendedResourceRequest{
		{ContainerName: "i", ResourceName: string(gpuResource), RequestName: "container-1-request-1"},
		{ContainerName: "a", ResourceName: string(gpuResource), RequestName: "container-1-request-1"},
	}}
	if diff := cmp.Diff(want, h.stored("p").Status.ExtendedResourceClaimStatus); diff != "" {
		t.Errorf("pod's status (-want +got):\n%s", diff)
	}
	if len(h.plugin.shared.account.Tracker.InFlightFor(p.UID)) > 0 {
		t.Error("the allocation is still in flight")
	}
}

// Whatever request fails, before or after it took effect: after Unreserve nothing is held, and the next attempt binds
// with one claim.
func TestExtendedResourceSurvivesEveryFailure(t *testing.T) {
	type failure struct {
		request string // "patch" is the patch of the pod's status
		after   bool   // it took effect
		lasting bool   // it goes on in Unreserve for a while
	}
	var failures []failure
	for _, request := range []string{"create/", "update/", "update/status", "patch"} {
		for _, after := range []bool{false, true} {
			failures = append(failures, failure{request, after, false}, failure{request, after, true})
		}
	}
	for _, f := range failures {
		t.Run(fmt.Sprintf("%s, effective %t, lasting %t", f.request, f.after, f.lasting), func(t *testing.T) {
			p := containersPod("a=2")
			h := newHarness(t, extendedWorld(p))
			failing := 100 // times
			fail := func(request string) error {
				if request != f.request || failing == 0 {
					return nil
				}
				failing--
				return errors.New("connection lost")
			}
			if f.after {
				h.api.afterWrite(fail)
			} else {
				h.api.onRequest(fail)
			}
			h.client.PrependReactor("patch", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
				err := fail("patch")
				if err != nil && f.after {
					changed := p.DeepCopy()
					changed.Status.ExtendedResourceClaimStatus = &v1.PodExtendedResourceClaimStatus{ResourceClaimName: "lost"}
					if updateErr := h.client.Tracker().Update(v1.SchemeGroupVersion.WithResource("pods"), changed, testNamespace); updateErr != nil {
						t.Error(updateErr)
					}
				}
				return err != nil, nil, err
			})
			first := h.filterAll(p).reserve("node-b")
			if status := first.preBind("node-b"); status.IsSuccess() {
				t.Fatal("PreBind did not fail")
			}
			failing = 0
			if f.lasting {
				failing = 2
			}
			first.unreserve("node-b")
			failing = 0
			left := h.extendedClaims()
			for _, c := range left {
				h.caughtUp(c.Name)
			}
			if held := h.held(); held != 0 {
				t.Errorf("%d devices are held after Unreserve", held)
			}
			// A claim of whose creation nobody knows holds nothing.
			if !f.lasting && f.request != "create/" && len(left) > 0 {
				t.Errorf("claim %s is left", left[0].Name)
			}

			h.filterAll(p).bind("node-b")
			claims := h.extendedClaims()
			if len(claims) != 1 || len(devicesOf(claims[0])) != 2 {
				t.Fatalf("%d claims, want one with 2 devices", len(claims))
			}
			h.caughtUp(claims[0].Name)
			if held := h.held(); held != 2 {
				t.Errorf("%d devices are held, want 2", held)
			}
			if got := h.stored("p").Status.ExtendedResourceClaimStatus.ResourceClaimName; got != claims[0].Name {
				t.Errorf("the pod's status names claim %s, want %s", got, claims[0].Name)
			}
		})
	}
}

// The answer to the pod's binding was lost, and Unreserve comes although it is bound: it keeps what it runs with.
func TestExtendedClaimOfABoundPodIsKept(t *testing.T) {
	p := containersPod("a=1")
	h := newHarness(t, extendedWorld(p))
	a := h.filterAll(p)
	a.bind("node-a")
	bound := h.stored("p")
	bound.Spec.NodeName = "node-a"
	if err := h.client.Tracker().Update(v1.SchemeGroupVersion.WithResource("pods"), bound, testNamespace); err != nil {
		t.Fatal(err)
	}
	a.unreserve("node-a")
	if claims := h.extendedClaims(); len(claims) != 1 {
		t.Errorf("%d claims, want the one of the bound pod", len(claims))
	}
}

// leftover is a claim that an earlier scheduler made for the pod and allocated on node-b.
func leftover(p *v1.Pod, change ...func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
	c := claim(p.Name+"-extended-resources-old", ownedBy(p))
	c.UID, c.Annotations = "old-uid", map[string]string{resourceapi.ExtendedResourceClaimAnnotation: "true"}
	n := p.Spec.Containers[0].Resources.Requests[gpuResource]
	c.Spec.Devices.Requests[0].Name, c.Spec.Devices.Requests[0].Exactly.Count = "container-0-request-1", n.Value()
	allocated("node-b", "gpu-0", "gpu-1")(c)
	reservedFor(p.Name)(c)
	for _, fn := range change {
		fn(c)
	}
	return c
}

// What a scheduler left that ended between the claim's creation and the pod's binding is used again, or removed.
func TestExtendedClaimOfAnEarlierScheduler(t *testing.T) {
	tests := map[string]struct {
		left func(p *v1.Pod) *resourceapi.ResourceClaim
		// adopted tells that the claim is used as it is; else another one is made.
		adopted bool
		// postFilter tells that the claim is in the way, and given up first.
		postFilter bool
	}{
		"allocated and reserved": {left: func(p *v1.Pod) *resourceapi.ResourceClaim { return leftover(p) }, adopted: true},
		"allocated, not reserved": {left: func(p *v1.Pod) *resourceapi.ResourceClaim {
			return leftover(p, func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil })
		}, adopted: true},
		"created only": {left: func(p *v1.Pod) *resourceapi.ResourceClaim {
			return leftover(p, func(c *resourceapi.ResourceClaim) { c.Status, c.Finalizers = resourceapi.ResourceClaimStatus{}, nil })
		}},
		"for other requests than the pod needs now": {left: func(p *v1.Pod) *resourceapi.ResourceClaim {
			return leftover(p, func(c *resourceapi.ResourceClaim) { c.Spec.Devices.Requests[0].Exactly.Count = 1 })
		}, postFilter: true},
		"for a node that is gone": {left: func(p *v1.Pod) *resourceapi.ResourceClaim {
			return leftover(p, allocated("node-x", "gpu-0", "gpu-1"))
		}, postFilter: true},
		"being deleted": {left: func(p *v1.Pod) *resourceapi.ResourceClaim { return leftover(p, deleting) }, postFilter: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			p := containersPod("a=2")
			w := extendedWorld(p)
			old := tc.left(p)
			w.claims = []*resourceapi.ResourceClaim{old}
			h := newHarness(t, w)
			if tc.postFilter {
				a := h.filterAll(p)
				if len(a.fits()) != 0 {
					t.Fatalf("fits on %v", a.fits())
				}
				if status := a.postFilter(); status.Code() != fwk.UnschedulableAndUnresolvable || !strings.Contains(status.Message(), old.Name) {
					t.Fatalf("PostFilter: %v", status)
				}
				h.eventually("nothing is held any more", func() bool { return h.held() == 0 })
				h.eventually("the pod is woken", func() bool { return slices.Contains(h.activator.taken(), "p") })
				if old.DeletionTimestamp != nil {
					h.api.delete(old.Name) // the API server does that once there is no finalizer
				}
				h.caughtUp(old.Name)
			}
			h.filterAll(p).bind("node-b")
			claims := h.extendedClaims()
			if len(claims) != 1 || (claims[0].Name == old.Name) != tc.adopted {
				t.Fatalf("%d claims, the first is %s, adopted %t wanted", len(claims), claims[0].Name, tc.adopted)
			}
			if diff := cmp.Diff([]string{"p"}, usersOf(claims[0])); diff != "" || len(devicesOf(claims[0])) != 2 {
				t.Errorf("devices %v, users (-want +got):\n%s", devicesOf(claims[0]), diff)
			}
			if got := h.stored("p").Status.ExtendedResourceClaimStatus; got == nil || got.ResourceClaimName != claims[0].Name {
				t.Errorf("the pod's status names claim %v, want %s", got, claims[0].Name)
			}
		})
	}
}

// A claim that an earlier attempt made and that somebody else uses cannot be adopted. It can when the other user goes, which frees no device.
func TestAPodIsWokenWhenTheClaimThatWasMadeForItMayBeAdopted(t *testing.T) {
	p := containersPod("a=2")
	old := leftover(p, reservedFor("other"))
	w := extendedWorld(p)
	w.claims = []*resourceapi.ResourceClaim{old, claim("holder-a", allocated("node-a", "gpu-0"))}
	h := newHarness(t, w)
	a := h.filterAll(p)
	if len(a.fits()) > 0 {
		t.Fatalf("fits on %v", a.fits())
	}
	a.postFilter()
	if woken := h.lookedAt(); len(woken) > 0 {
		t.Fatalf("%v woken before anything has changed", woken)
	}
	h.api.change(old.Name, func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = c.Status.ReservedFor[:1] })
	h.wakes("p")
}

// A scheduler has ended before it bound the pods of a group, and the group does not fit any more. The claim of one that fits, or was not tried, goes.
func TestExtendedClaimOfAGroupThatWaitsGoes(t *testing.T) {
	withGroups(t)
	for name, tried := range map[string]bool{"it fits": true, "it is not tried": false} {
		t.Run(name, func(t *testing.T) {
			p, q := member(containersPod("a=2")), member(pod("q", "large"))
			w := extendedWorld(p, q)
			w.groups = []*schedulingapi.PodGroup{group()}
			w.claims = []*resourceapi.ResourceClaim{leftover(p), claim("large", counted(3))}
			h := newHarness(t, w)
			g := h.tryGroup(p, q)
			if g.wantNodes("node-b", ""); !tried {
				g = h.tryGroup(q)
				g.pods = []*v1.Pod{q, p}
			}
			g.postFilter(nil)
			h.eventually("nothing is held any more", func() bool { return h.held() == 0 })
		})
	}
}

// Whoever may make claims in another namespace can say that a pod owns them. The pod does not use such a claim, nor remove it.
func TestExtendedClaimOfAnotherNamespaceIsNotThePods(t *testing.T) {
	for name, left := range map[string]func(*resourceapi.ResourceClaim){
		"allocated":     allocated("node-x", "gpu-0", "gpu-1"),
		"not allocated": func(c *resourceapi.ResourceClaim) { c.Status, c.Finalizers = resourceapi.ResourceClaimStatus{}, nil },
	} {
		t.Run(name, func(t *testing.T) {
			p := containersPod("a=2")
			w := extendedWorld(p)
			foreign := leftover(p, left, func(c *resourceapi.ResourceClaim) { c.Namespace = "another" })
			w.claims = []*resourceapi.ResourceClaim{foreign}
			h := newHarness(t, w)
			h.filterAll(p).bind("node-b")
			if got := h.stored("p").Status.ExtendedResourceClaimStatus; got == nil || got.ResourceClaimName == foreign.Name {
				t.Errorf("the pod's status names claim %v", got)
			}
			if len(h.extendedClaims()) != 2 {
				t.Error("the claim of the other namespace is gone")
			}
		})
	}
}

// A pod whose status names a claim is not started by a kubelet without that claim, also where a device plugin has
// what the pod needs.
func TestPodWithARecordedClaimStaysOffDevicePluginNodes(t *testing.T) {
	plugin := node("node-p", func(n *v1.Node) { n.Status.Allocatable = v1.ResourceList{gpuResource: resource.MustParse("4")} })
	p := containersPod("a=2")
	w := extendedWorld(p)
	w.nodes = append(w.nodes, plugin)
	h := newHarness(t, w)
	if diff := cmp.Diff([]string{"node-b", "node-p"}, h.filterAll(p).fits()); diff != "" {
		t.Errorf("a new pod: nodes (-want +got):\n%s", diff)
	}

	// The patch took effect, its answer was lost, and the informer has not seen it.
	h.client.PrependReactor("patch", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("connection lost")
	})
	a := h.filterAll(p).reserve("node-b")
	a.preBind("node-b")
	a.unreserve("node-b")
	again := h.filterAll(p)
	if diff := cmp.Diff([]string{"node-b"}, again.fits()); diff != "" || again.filter["node-p"] != toldClaimRecorded {
		t.Errorf("after a lost answer: %q, nodes (-want +got):\n%s", again.filter["node-p"], diff)
	}

	known := containersPod("a=2")
	known.UID = "another"
	known.Status.ExtendedResourceClaimStatus = recordedPod("p", gpuResource).Status.ExtendedResourceClaimStatus
	if diff := cmp.Diff([]string{"node-b"}, h.filterAll(known).fits()); diff != "" {
		t.Errorf("with the status: nodes (-want +got):\n%s", diff)
	}
}

// A node whose device plugin has gone still runs pods that have devices from it. Nobody knows which, so no claim gets
// a device there.
func TestNodeWhoseDevicePluginIsLeaving(t *testing.T) {
	gone := func(n *v1.Node) { n.Status.Allocatable = v1.ResourceList{gpuResource: resource.MustParse("0")} }
	on := func(p *v1.Pod, nodeName string) *v1.Pod {
		p.Spec.NodeName = nodeName
		return p
	}
	tests := map[string]struct {
		change  func(*v1.Node)
		running *v1.Pod
		want    string
	}{
		"its pod has a device from the device plugin": {change: gone, running: on(extendedPod("old", gpuResource), "node-b"), want: toldPluginLeaving},
		"its pod has a device from a claim":           {change: gone, running: on(recordedPod("old", gpuResource), "node-b")},
		"its pod has none":                            {change: gone, running: on(extendedPod("old", nicResource), "node-b")},
		"there never was a device plugin":             {change: func(*v1.Node) {}, running: on(extendedPod("old", gpuResource), "node-b")},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			p := containersPod("a=2")
			w := extendedWorld(p)
			tc.change(w.nodes[1])
			w.pods = append(w.pods, tc.running)
			h := newHarness(t, w)
			if got := h.filterAll(p).filter["node-b"]; got != tc.want {
				t.Errorf("reason %q, want %q", got, tc.want)
			}
		})
	}
}

// A pod that is being bound to such a node has its devices from a claim, although the scheduler's copy of the pod does
// not say so yet.
func TestPodBeingBoundIsNotTakenForOneOfTheDevicePlugin(t *testing.T) {
	bound := containersPod("a=1")
	bound.Name, bound.UID = "bound", "bound-uid"
	p := containersPod("a=1")
	w := extendedWorld(p, bound)
	w.nodes[1].Status.Allocatable = v1.ResourceList{gpuResource: resource.MustParse("0")}
	h := newHarness(t, w)
	a := h.filterAll(bound).reserve("node-b")
	assumed := bound.DeepCopy()
	assumed.Spec.NodeName = "node-b"
	h.nodes[1].AddPodInfo(podInfo(assumed))
	if got := h.filterAll(p).filter["node-b"]; got != "" {
		t.Errorf("in flight: reason %q", got)
	}
	if status := a.preBind("node-b"); !status.IsSuccess() {
		t.Fatal(status)
	}
	if got := h.filterAll(p).filter["node-b"]; got != "" {
		t.Errorf("written: reason %q", got)
	}
	a.unreserve("node-b")
	h.eventually("nothing is held any more", func() bool { return h.held() == 0 && len(h.extendedClaims()) == 0 })
	h.eventually("the claim is known to be gone", func() bool { return len(h.plugin.shared.account.Tracker.OwnedBy(bound.Namespace, bound.UID)) == 0 })
	if got := h.filterAll(p).filter["node-b"]; got != toldPluginLeaving {
		t.Errorf("without a claim: reason %q, want %q", got, toldPluginLeaving)
	}
}

// NodeResourcesFit has left the resource to claims, and then its class goes: the pod must not pass without a device.
func TestClassThatGoesDuringTheCycle(t *testing.T) {
	p := containersPod("a=1")
	w := extendedWorld(p)
	h := newHarness(t, w)
	a := h.filterAll(p)
	if diff := cmp.Diff([]string{"node-a", "node-b"}, a.fits()); diff != "" {
		t.Fatalf("nodes (-want +got):\n%s", diff)
	}
	delete(w.resolver, gpuResource)
	if got := h.plugin.Filter(h.ctx, a.state, p, h.nodes[1]).Message(); got != toldClassGone {
		t.Errorf("reason %q, want %q", got, toldClassGone)
	}
}

// A class that comes during the cycle is served: NodeResourcesFit may have seen it.
func TestClassThatComesDuringTheCycle(t *testing.T) {
	p := containersPod("a=1")
	w := extendedWorld(p)
	delete(w.resolver, gpuResource)
	h := newHarness(t, w)
	a := h.filterAll(p)
	w.resolver[gpuResource] = testClass
	a.filter["node-b"] = h.plugin.Filter(h.ctx, a.state, p, h.nodes[1]).Message()
	a.bind("node-b")
	if claims := h.extendedClaims(); len(claims) != 1 || len(devicesOf(claims[0])) != 1 {
		t.Errorf("%d claims, want one with one device", len(claims))
	}
}

// A pod that others were evicted for gets its extended resource: nobody takes the devices before there is a claim.
func TestNominatedPodWithAnExtendedResourceKeepsItsDevices(t *testing.T) {
	for nominated, fits := range map[string]bool{"a=2": false, "a=1": true, "a=3": true} { // three are more than there are
		t.Run(nominated, func(t *testing.T) {
			nominee := containersPod(nominated)
			nominee.Name, nominee.UID, nominee.Spec.Priority = "nominee", "nominee-uid", ptr.To[int32](5)
			p := containersPod("a=1")
			h := newHarness(t, extendedWorld(p, nominee))
			h.nominator.nominate("node-b", nominee)
			a := h.filterAll(p)
			if status := a.filterNominated("node-b"); status.IsSuccess() != fits {
				t.Errorf("the node fits %t, want %t: %v", status.IsSuccess(), fits, status)
			}
			if status := h.plugin.Reserve(h.ctx, a.state, p, "node-b"); status.IsSuccess() != fits {
				t.Errorf("Reserve: %v, want success %t", status, fits)
			}
		})
	}
}

// The devices of a pod that has them from a claim for its extended resource are free without the pod, also while the
// scheduler's copy of the pod does not name the claim yet.
func TestPodWithAnExtendedResourceCanBePreempted(t *testing.T) {
	low := containersPod("a=2")
	low.Name, low.UID, low.Spec.Priority = "low", "low-uid", ptr.To[int32](1)
	p := containersPod("a=2")
	p.Spec.Priority = ptr.To[int32](9)
	h := newHarness(t, extendedWorld(p, low))
	h.filterAll(low).bind("node-b")
	assumed := low.DeepCopy()
	assumed.Spec.NodeName = "node-b"
	h.nodeOf("node-b").AddPodInfo(podInfo(assumed))

	a := h.filterAll(p)
	if status := h.plugin.Filter(h.ctx, a.state, p, h.nodeOf("node-b")); status.Code() != fwk.Unschedulable {
		t.Errorf("a node with a victim: %v, want code %v", status, fwk.Unschedulable)
	}
	if status := a.dryRun("node-b", byName(assumed), "low"); !status.IsSuccess() {
		t.Errorf("without the victim: %v", status)
	}
	if status := a.dryRun("node-b", byName(assumed), "low", "+low"); status.IsSuccess() {
		t.Error("with the victim again, the node fits")
	}
}

// A pod is told that there is no such class. When there is, that is not true any more, even if the class selects no device.
func TestAClassThatComesAndSelectsNothingIsTold(t *testing.T) {
	p := extendedPod("p", gpuResource)
	w := extendedWorld(p)
	w.resolver = map[v1.ResourceName]string{gpuResource: "late"}
	h := newHarness(t, w)
	told := func() string {
		t.Helper()
		a := h.filterAll(p)
		if len(a.fits()) > 0 {
			t.Fatalf("the pod fits %v", a.fits())
		}
		defer h.lookedAt()
		return a.postFilter().Message() + fmt.Sprint(a.filter)
	}
	if got := told(); !strings.Contains(got, `"late" does not exist`) {
		t.Errorf("told %q, want that the class does not exist", got)
	}
	late := class("late")
	late.Spec.Selectors[0].CEL.Expression = "false"
	if _, err := h.client.ResourceV1().DeviceClasses().Create(h.ctx, late, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	h.wakes("p")
	if got := told(); strings.Contains(got, "does not exist") || !strings.Contains(got, "0 of 3 devices match class late's selectors") {
		t.Errorf("told %q, want that no device matches", got)
	}
	late.Spec.Selectors[0].CEL.Expression = "false && true"
	if _, err := h.client.ResourceV1().DeviceClasses().Update(h.ctx, late, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := h.lookedAt(); len(got) > 0 {
		t.Errorf("woken: %v, and the class was there and still selects nothing", got)
	}
}

// Who waits for the devices of a claim that is not made yet is told whose extended resources it is for.
func TestAClaimThatIsNotMadeYetIsToldByItsPod(t *testing.T) {
	first, second := extendedPod("first", gpuResource), extendedPod("second", gpuResource)
	for _, p := range []*v1.Pod{first, second} {
		p.Spec.Containers[0].Resources.Requests[gpuResource] = resource.MustParse("2")
	}
	h := newHarness(t, extendedWorld(first, second))
	h.filterAll(first).reserve("node-b")
	a := h.filterAll(second)
	if len(a.fits()) > 0 {
		t.Fatalf("the second pod fits %v", a.fits())
	}
	const want = "would fit on node node-b if claim team-a/<extended-resources of first> were released"
	if got := a.postFilter().Message(); !strings.Contains(got, want) {
		t.Errorf("told %q, want %q", got, want)
	}
}

// twoPaths is a world in which node-b has a device plugin beside its slice, whose agent had seen so many devices of it.
func twoPaths(allocatable string, seen int, change ...func(*resourceapi.Device)) world {
	w := twoNodes()
	w.nodes[1].Status.Allocatable = v1.ResourceList{gpuResource: resource.MustParse(allocatable)}
	for _, object := range w.objects {
		if s, ok := object.(*resourceapi.ResourceSlice); ok && s.Spec.Pool.Name == "node-b" {
			twopaths.Mark(s.Spec.Devices, seen)
			for _, fn := range change {
				fn(&s.Spec.Devices[1]) // gpu-1
			}
		}
	}
	return w
}

// ofDevicePlugin is the taint by which the agent says that a device plugin has the device.
func ofDevicePlugin(d *resourceapi.Device) {
	d.Taints = []resourceapi.DeviceTaint{{Key: testDriver + "/" + twopaths.TaintName, Value: twopaths.TaintValue, Effect: resourceapi.DeviceTaintEffectNoSchedule}}
}

// Pods have devices from a device plugin, and the agent has not told yet which: no claim gets a device of the node. A node with devices on
// both paths is used as soon as the agent has told.
func TestNoClaimGetsADeviceThatADevicePluginMayHaveGivenAway(t *testing.T) {
	on := func(p *v1.Pod) *v1.Pod {
		p.Spec.NodeName = "node-b"
		return p
	}
	greedy := func(name string) *v1.Pod {
		p := on(extendedPod(name, gpuResource))
		p.Spec.Containers[0].Resources.Requests[gpuResource] = *resource.NewQuantity(math.MaxInt64, resource.DecimalSI)
		return p
	}
	withIll := func(w world) world {
		w.nodes[1].Status.Capacity = v1.ResourceList{gpuResource: resource.MustParse("3")}
		return w
	}
	without := func(w world) world { // slices of node-b, as when the kubelet has just started
		w.objects = slices.DeleteFunc(w.objects, func(o runtime.Object) bool {
			s, ok := o.(*resourceapi.ResourceSlice)
			return ok && s.Spec.Pool.Name == "node-b"
		})
		return w
	}
	incomplete := func(w world) world {
		for _, o := range w.objects {
			if s, ok := o.(*resourceapi.ResourceSlice); ok && s.Spec.Pool.Name == "node-b" {
				s.Spec.Pool.ResourceSliceCount = 2
			}
		}
		return w
	}
	moved := func(w world) world { // all devices to the device plugin's path
		for _, o := range w.objects {
			if s, ok := o.(*resourceapi.ResourceSlice); ok && s.Spec.Pool.Name == "node-b" {
				s.Spec.Devices = nil
			}
		}
		return w
	}
	of := func(driver string, w world) world { // slices of a driver that is not ours
		s := slice("node-b", device("nic-0"))
		s.Name, s.Spec.Driver = "of-another-driver", driver
		w.objects = append(w.objects, s)
		return w
	}
	hasOf := func(driver string) *resourceapi.ResourceClaim {
		c := claim("held", allocated("node-b", "nic-0"))
		c.Status.Allocation.Devices.Results[0].Driver = driver
		return c
	}
	inShares := func(d *resourceapi.Device) { d.AllowMultipleAllocations = ptr.To(true) }
	some := []*v1.Pod{on(extendedPod("other", gpuResource)), on(extendedPod("old", gpuResource))}
	for name, tc := range map[string]struct {
		world  world
		pods   []*v1.Pod
		claims []*resourceapi.ResourceClaim
		pod    *v1.Pod // of a claim for one device if nil
		want   string
	}{
		"pods have some, and nothing is told":                                 {world: twoPaths("2", 0), pods: some, want: toldUnseen},
		"one is told of, and the plugin has two":                              {world: twoPaths("2", 1, ofDevicePlugin), pods: some, want: toldUnseen},
		"the plugin has gone, its pods have not":                              {world: twoPaths("0", 0), pods: some, want: toldUnseen},
		"devices are given in shares":                                         {world: twoPaths("2", 0, inShares), pods: some, want: toldUnseen},
		"pods name their node, and ask for more than there can be":            {world: twoPaths("2", 2), pods: []*v1.Pod{greedy("a"), greedy("b")}, want: toldUnseen},
		"one is unhealthy, and may recover":                                   {world: withIll(twoPaths("2", 2)), pods: some, want: toldUnseen},
		"the plugin has gone, and its capacity is still there":                {world: withIll(twoPaths("0", 2)), pods: some},
		"nobody has any of them":                                              {world: twoPaths("2", 0)},
		"pods have them from claims":                                          {world: twoPaths("2", 0), pods: []*v1.Pod{on(recordedPod("old", gpuResource))}},
		"all are told of: the agent's own, which are in no slice":             {world: twoPaths("2", 2), pods: some},
		"all are told of: one of the slice is one of the plugin's":            {world: twoPaths("2", 2, ofDevicePlugin), pods: some},
		"pods have devices of another vendor":                                 {world: twoPaths("2", 2), pods: append(slices.Clone(some), on(extendedPod("nic", "example.org/nic")))},
		"the claim is for a device that there is not":                         {world: twoPaths("2", 0), pods: some, pod: pod("p", "h200"), want: explain.ReasonNoMatch.OfNodes()},
		"by the plugin, while a claim has what may be the plugin's":           {world: twoPaths("2", 0), claims: []*resourceapi.ResourceClaim{claim("held", allocated("node-b", "gpu-0"))}, pod: extendedPod("p", gpuResource), want: toldGivenToClaims},
		"by the plugin, while a claim has what is the plugin's":               {world: twoPaths("2", 2, ofDevicePlugin), claims: []*resourceapi.ResourceClaim{claim("held", allocated("node-b", "gpu-1"))}, pod: extendedPod("p", gpuResource), want: toldGivenToClaims},
		"by the plugin, and what claims have is not the plugin's":             {world: twoPaths("2", 2, ofDevicePlugin), claims: []*resourceapi.ResourceClaim{claim("held", allocated("node-b", "gpu-0"))}, pod: extendedPod("p", gpuResource)},
		"by the plugin, while a claim has what may be one that is unhealthy":  {world: withIll(twoPaths("2", 2, ofDevicePlugin)), claims: []*resourceapi.ResourceClaim{claim("held", allocated("node-b", "gpu-0"))}, pod: extendedPod("p", gpuResource), want: toldGivenToClaims},
		"by the plugin, while a claim has a device, and there are no slices":  {world: without(twoPaths("2", 2)), claims: []*resourceapi.ResourceClaim{claim("held", allocated("node-b", "gpu-0"))}, pod: extendedPod("p", gpuResource), want: toldGivenToClaims},
		"by the plugin, while a claim has a device, and one slice is missing": {world: incomplete(twoPaths("2", 2)), claims: []*resourceapi.ResourceClaim{claim("held", allocated("node-b", "gpu-0"))}, pod: extendedPod("p", gpuResource), want: toldGivenToClaims},
		"by the plugin, and there are neither slices nor claims":              {world: without(twoPaths("2", 2)), pod: extendedPod("p", gpuResource)},
		"by the plugin, a claim has one still, and all have been moved":       {world: moved(twoPaths("2", 2)), claims: []*resourceapi.ResourceClaim{claim("held", allocated("node-b", "gpu-0"))}, pod: extendedPod("p", gpuResource)},
		"by the plugin, and a claim has another vendor's":                     {world: of("nic.example.org", without(twoPaths("2", 2))), claims: []*resourceapi.ResourceClaim{hasOf("nic.example.org")}, pod: extendedPod("p", gpuResource)},
		"by the plugin, and a claim has another driver's of the vendor":       {world: of("compute-domain.example.com", without(twoPaths("2", 2))), claims: []*resourceapi.ResourceClaim{hasOf("compute-domain.example.com")}, pod: extendedPod("p", gpuResource)},
		"by the plugin, and claims have nothing":                              {world: twoPaths("2", 0), pods: some, pod: extendedPod("p", gpuResource)},
		"from another device plugin":                                          {world: twoPaths("2", 0), claims: []*resourceapi.ResourceClaim{claim("held", allocated("node-b", "gpu-0"))}, pod: extendedPod("p", "example.org/nic")},
	} {
		t.Run(name, func(t *testing.T) {
			w := tc.world
			w.nodes[1].Status.Allocatable["example.org/nic"] = resource.MustParse("2")
			p := tc.pod
			if p == nil {
				p = pod("p", "one")
			}
			w.pods = append(tc.pods, p)
			w.claims = append(tc.claims, claim("one"), claim("h200", withSelector(`device.attributes["gpu.example.com"].model == "H200"`)))
			h := newHarness(t, w)
			a := h.filterAll(p)
			if got := a.filter["node-b"]; got != tc.want {
				t.Errorf("reason %q, want %q", got, tc.want)
			}
			if tc.want == "" && len(p.Spec.ResourceClaims) > 0 {
				a.reserve("node-b")
			}
		})
	}
}

// A claim that may get a device of another vendor's pool, too, gets that one, in Reserve as well as in Filter.
func TestAClaimGetsADeviceThatNoDevicePluginHas(t *testing.T) {
	w := twoPaths("2", 0)
	other := slice("node-b", device("other-0", withModel("H100")))
	other.Name, other.Spec.Driver = "other-slice", "gpu.example.org"
	both := class("both")
	both.Spec.Selectors = nil
	w.objects = append(w.objects, other, both)
	running := extendedPod("old", gpuResource)
	running.Spec.NodeName = "node-b"
	w.pods = []*v1.Pod{running, pod("p", "one"), pod("q", "two")}
	w.claims = []*resourceapi.ResourceClaim{claim("one", withClass("both")), claim("two", withClass("both"))}
	h := newHarness(t, w)
	a := h.filterAll(w.pods[1]).reserve("node-b")
	c, err := cycle.Read(a.state)
	if err != nil {
		t.Fatal(err)
	}
	if got := c.Binding.Reserved[0].Allocation.Devices.Results[0].Device; got != "other-0" {
		t.Errorf("it got %s", got)
	}
	if got := h.filterAll(w.pods[2]).filter["node-b"]; got != toldUnseen {
		t.Errorf("a second one: %q, want %q", got, toldUnseen)
	}
}

// Whoever is refused is tried again when the agent tells, when the last pod with such a device ends, and when the device plugin has gone.
func TestPodsAreWokenWhenADevicePluginsDevicesAreKnown(t *testing.T) {
	running := extendedPod("old", gpuResource)
	running.Spec.NodeName = "node-b"
	waiting := pod("p", "one")
	for name, happens := range map[string]func(*harness, world){
		"the agent tells": func(h *harness, w world) {
			s := w.objects[2].(*resourceapi.ResourceSlice).DeepCopy()
			twopaths.Mark(s.Spec.Devices, 2)
			s.Spec.Pool.Generation++
			if _, err := h.client.ResourceV1().ResourceSlices().Update(h.ctx, s, metav1.UpdateOptions{}); err != nil {
				h.t.Fatal(err)
			}
		},
		"the pod ends": func(h *harness, _ world) {
			if hint, err := h.plugin.hints.AfterPodDeletion(klog.FromContext(h.ctx), waiting, running, nil); hint != fwk.QueueSkip || err != nil {
				h.t.Errorf("hint %v, %v", hint, err)
			}
		},
		"the device plugin goes": func(h *harness, w world) {
			after := w.nodes[1].DeepCopy()
			after.Status.Allocatable[gpuResource] = resource.MustParse("0")
			if hint, err := h.plugin.hints.AfterNodeChange(klog.FromContext(h.ctx), waiting, w.nodes[1], after); hint != fwk.QueueSkip || err != nil {
				h.t.Errorf("hint %v, %v", hint, err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoPaths("2", 0)
			w.nodes = append(w.nodes[:0:0], w.nodes[0], w.nodes[1])
			w.pods = []*v1.Pod{running, waiting}
			w.claims = []*resourceapi.ResourceClaim{claim("one", withSelector(`device.attributes["gpu.example.com"].model == "H100"`))}
			h := newHarness(t, w)
			a := h.filterAll(waiting)
			if status := a.postFilter(); a.filter["node-b"] != toldUnseen {
				t.Fatalf("%q, %v", a.filter["node-b"], status)
			}
			h.activator.taken()
			happens(h, w)
			h.eventually("the pod is woken", func() bool { return slices.Contains(h.activator.taken(), "p") })
		})
	}
}

// A pod of the device plugin waits for the slices of a node whose kubelet has just started.
func TestAPodOfADevicePluginIsWokenWhenSlicesAreBack(t *testing.T) {
	w := twoPaths("2", 2)
	back := w.objects[2].(*resourceapi.ResourceSlice)
	w.objects = w.objects[:2]
	w.room = wakeup.Options{RetryAfter: time.Hour}
	w.pods = []*v1.Pod{extendedPod("p", gpuResource)}
	w.claims = []*resourceapi.ResourceClaim{claim("held", allocated("node-b", "gpu-1"))}
	h := newHarness(t, w)
	a := h.filterAll(w.pods[0])
	if status := a.postFilter(); a.filter["node-b"] != toldGivenToClaims {
		t.Fatalf("%q, %v", a.filter["node-b"], status)
	}
	h.activator.taken()
	if _, err := h.client.ResourceV1().ResourceSlices().Create(h.ctx, back, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	h.eventually("the pod is woken", func() bool { return slices.Contains(h.activator.taken(), "p") })
	if got := h.filterAll(w.pods[0]).filter["node-b"]; got != "" {
		t.Errorf("refused: %q", got)
	}
}

// A pod of the device plugin, for which no class stands, waits for a claim: it is tried again when that ends, and not only by and by.
func TestAPodOfADevicePluginIsWokenWhenTheClaimEnds(t *testing.T) {
	for name, seen := range map[string]int{"it may have what is the plugin's": 0, "it has what is the plugin's": 2} {
		t.Run(name, func(t *testing.T) {
			w := twoPaths("2", seen, ofDevicePlugin)
			w.room = wakeup.Options{RetryAfter: time.Hour}
			w.pods = []*v1.Pod{extendedPod("p", gpuResource)}
			w.claims = []*resourceapi.ResourceClaim{claim("held", allocated("node-b", "gpu-1"))}
			h := newHarness(t, w)
			a := h.filterAll(w.pods[0])
			if status := a.postFilter(); a.filter["node-b"] != toldGivenToClaims {
				t.Fatalf("%q, %v", a.filter["node-b"], status)
			}
			if got := h.lookedAt(); len(got) > 0 {
				t.Errorf("woken at once: %v", got)
			}
			h.api.delete("held")
			h.wakes("p")
		})
	}
}
