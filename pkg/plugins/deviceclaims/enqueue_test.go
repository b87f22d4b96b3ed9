// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"
)

func TestPreEnqueue(t *testing.T) {
	mine := templatePod("mine", "mine-gpu")
	tests := map[string]struct {
		pod  *v1.Pod
		want string
	}{
		"a pod without claims may enter":         {pod: pod("plain")},
		"a pod with an existing claim may enter": {pod: pod("user", "shared")},
		"a pod with its own generated claim may enter": {
			pod: mine,
		},
		"a claim still to be made from its template keeps the pod out": {
			pod:  templatePod("early", ""),
			want: `spec.resourceClaims[0] "gpu": no claim has been made yet from template "one-gpu"`,
		},
		"a missing claim keeps the pod out": {
			pod:  pod("user", "shared", "missing"),
			want: `claim team-a/missing does not exist`,
		},
		"a generated claim of another pod keeps the pod out": {
			pod:  templatePod("thief", "mine-gpu"),
			want: `ResourceClaim team-a/mine-gpu was not created for Pod team-a/thief (Pod is not owner)`,
		},
		"a claim being deleted keeps the pod out": {
			pod:  pod("user", "leaving"),
			want: `claim team-a/leaving is being deleted`,
		},
		"a pod that has a node is held back by nothing": {
			pod: boundPod(pod("user", "leaving"), "user-uid"),
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, world{
				pods: []*v1.Pod{tc.pod},
				claims: []*resourceapi.ResourceClaim{
					claim("shared"),
					claim("mine-gpu", ownedBy(mine)),
					claim("leaving", deleting),
				},
			})
			status := h.plugin.PreEnqueue(h.ctx, tc.pod)
			if diff := cmp.Diff(tc.want, status.Message()); diff != "" {
				t.Errorf("reason differs (-want +got):\n%s", diff)
			}
			if tc.want != "" && status.Code() != fwk.UnschedulableAndUnresolvable {
				t.Errorf("code %v", status.Code())
			}
		})
	}
}

// Of those who hear of pods each hears for itself: the queue may take up a pod of whose end the waiting room has heard before.
func TestAPodThatIsGoneDoesNotWait(t *testing.T) {
	another := pod("p")
	another.UID = "another"
	for name, others := range map[string][]*v1.Pod{"it is gone": nil, "there is another one of its name": {another}} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.pods, w.claims = others, []*resourceapi.ResourceClaim{claim("c")}
			h := newHarness(t, w)
			for _, p := range []*v1.Pod{pod("p", "missing"), templatePod("p", "")} {
				if status := h.plugin.PreEnqueue(h.ctx, p); !status.IsSuccess() {
					t.Errorf("it is kept back, and would keep back its group: %v", status)
				}
			}
			if h.plugin.shared.waiting.IsWaiting("p-uid") {
				t.Error("it waits for its claim")
			}
			h.filterAll(pod("p", "c"))
			if h.plugin.shared.waiting.IsWaiting("p-uid") {
				t.Error("it waits for devices")
			}
		})
	}
}

func TestSignPod(t *testing.T) {
	h := newHarness(t, world{})
	if _, status := h.plugin.SignPod(h.ctx, pod("plain")); !status.IsSuccess() {
		t.Errorf("a pod without claims is not signed: %v", status)
	}
	if _, status := h.plugin.SignPod(h.ctx, pod("user", "c")); status.Code() != fwk.Unschedulable {
		t.Errorf("a pod with claims is signed: %v", status)
	}

	h = newHarness(t, extendedWorld())
	if _, status := h.plugin.SignPod(h.ctx, extendedPod("gpu", gpuResource)); status.Code() != fwk.Unschedulable {
		t.Errorf("a pod with an extended resource that a class stands for is signed: %v", status)
	}
	if _, status := h.plugin.SignPod(h.ctx, extendedPod("nic", nicResource)); !status.IsSuccess() {
		t.Errorf("a pod with an extended resource of a device plugin is not signed: %v", status)
	}
}

func TestHints(t *testing.T) {
	w := extendedWorld()
	w.claims = []*resourceapi.ResourceClaim{claim("free"), claim("bound", allocated("node-c", "gpu-0"))}
	h := newHarness(t, w)
	registered, err := h.plugin.EventsToRegister(h.ctx)
	if err != nil {
		t.Fatal(err)
	}
	hintFor := func(kind fwk.EventResource, action fwk.ActionType) fwk.QueueingHintFn {
		i := slices.IndexFunc(registered, func(e fwk.ClusterEventWithHint) bool {
			return framework.MatchClusterEvents(e.Event, fwk.ClusterEvent{Resource: kind, ActionType: action})
		})
		if i < 0 {
			t.Fatalf("no hint for %s", kind)
		}
		return registered[i].QueueingHintFn
	}
	labelled := func(n *v1.Node) { n.Labels = map[string]string{"rack": "1"} }
	declaring := func(n *v1.Node) { n.Status.DeclaredFeatures = []string{"DRAOptionalNodeOperations"} }
	withGPUs := func(n *v1.Node) { n.Status.Allocatable = v1.ResourceList{"example.com/gpu": resource.MustParse("8")} }
	withoutGPUs := func(n *v1.Node) { n.Status.Allocatable = v1.ResourceList{"example.com/gpu": resource.MustParse("0")} }
	placed := func(p *v1.Pod) *v1.Pod {
		p.Spec.NodeName = "node-a"
		return p
	}
	nominated := func(node string) *v1.Pod {
		p := pod("p", "free")
		p.Status.NominatedNodeName = node
		return p
	}
	extendedClass := func(name string) *resourceapi.DeviceClass {
		c := class("other")
		c.Spec.ExtendedResourceName = ptr.To(name)
		return c
	}

	tests := map[string]struct {
		kind     fwk.EventResource
		action   fwk.ActionType
		pod      *v1.Pod
		old, new any
		want     fwk.QueueingHint
	}{
		"the last generated claim's name arrives": {
			kind: fwk.TargetPod, action: fwk.UpdatePodGeneratedResourceClaim,
			pod: templatePod("p", ""), old: templatePod("p", ""), new: templatePod("p", "p-gpu"), want: fwk.Queue,
		},
		"a generated claim's name is still missing": {
			kind: fwk.TargetPod, action: fwk.UpdatePodGeneratedResourceClaim,
			pod: templatePod("p", ""), old: templatePod("p", ""), new: templatePod("p", ""), want: fwk.QueueSkip,
		},
		"the API shows that the pod is nominated": {
			kind: fwk.TargetPod, action: fwk.Update, pod: nominated("node-a"), old: nominated(""), new: nominated("node-a"), want: fwk.Queue,
		},
		"the API shows that the pod is not nominated any more": {
			kind: fwk.TargetPod, action: fwk.Update, pod: nominated(""), old: nominated("node-a"), new: nominated(""), want: fwk.Queue,
		},
		"something else of a nominated pod changes": {
			kind: fwk.TargetPod, action: fwk.Update, pod: nominated("node-a"), old: nominated("node-a"), new: nominated("node-a"),
			want: fwk.QueueSkip,
		},
		"another pod is nominated while the pod is tried": {
			kind: fwk.TargetPod, action: fwk.Update, pod: pod("q", "free"), old: nominated(""), new: nominated("node-a"), want: fwk.QueueSkip,
		},
		"a node with devices joins": {
			kind: fwk.Node, action: fwk.Add, pod: pod("p", "free"), new: node("node-a"), want: fwk.Queue,
		},
		"a node without devices joins": {
			kind: fwk.Node, action: fwk.Add, pod: pod("p", "free"), new: node("node-z"), want: fwk.QueueSkip,
		},
		"the node of the pod's allocation comes back before its slices": {
			kind: fwk.Node, action: fwk.Add, pod: pod("p", "bound"), new: node("node-c"), want: fwk.Queue,
		},
		"a node with devices changes labels": {
			kind: fwk.Node, action: fwk.UpdateNodeLabel, pod: pod("p", "free"), old: node("node-a"), new: node("node-a", labelled), want: fwk.Queue,
		},
		"a node with devices declares that it can skip node operations": {
			kind: fwk.Node, action: fwk.UpdateNodeDeclaredFeature, pod: pod("p", "free"), old: node("node-a"), new: node("node-a", declaring), want: fwk.Queue,
		},
		"a node with devices changes in another way": {
			kind: fwk.Node, action: fwk.UpdateNodeAllocatable, pod: pod("p", "free"), old: node("node-a"), new: node("node-a", withGPUs), want: fwk.QueueSkip,
		},
		"a device plugin registers the pod's extended resource": {
			kind: fwk.Node, action: fwk.UpdateNodeAllocatable, pod: extendedPod("p", "example.com/gpu"), old: node("node-z"), new: node("node-z", withGPUs), want: fwk.Queue,
		},
		"a node with devices for the pod's extended resource": {
			kind: fwk.Node, action: fwk.Add, pod: extendedPod("p", "example.com/gpu"), new: node("node-a"), want: fwk.Queue,
		},
		"a node with devices that do not count for the pod's extended resource": {
			kind: fwk.Node, action: fwk.Add, pod: extendedPod("p", "example.com/nic"), new: node("node-a"), want: fwk.QueueSkip,
		},
		"the device plugin of the pod's extended resource goes, and claims come": {
			kind: fwk.Node, action: fwk.UpdateNodeAllocatable, pod: extendedPod("p", "example.com/gpu"), old: node("node-z", withGPUs), new: node("node-z", withoutGPUs), want: fwk.Queue,
		},
		"a pod leaves that had the extended resource from a device plugin": {
			kind: fwk.AssignedPod, action: fwk.Delete, pod: extendedPod("p", "example.com/gpu"), old: placed(extendedPod("q", "example.com/gpu")), want: fwk.Queue,
		},
		"a pod leaves that had the extended resource from a claim": {
			kind: fwk.AssignedPod, action: fwk.Delete, pod: extendedPod("p", "example.com/gpu"), old: placed(recordedPod("q", "example.com/gpu")), want: fwk.QueueSkip,
		},
		"a pod leaves that had another extended resource": {
			kind: fwk.AssignedPod, action: fwk.Delete, pod: extendedPod("p", "example.com/gpu"), old: placed(extendedPod("q", "example.com/nic")), want: fwk.QueueSkip,
		},
		"a class no longer stands for the pod's extended resource": {
			kind: fwk.DeviceClass, action: fwk.Update, pod: extendedPod("p", "example.com/gpu"),
			old: extendedClass("example.com/gpu"), new: class("other"), want: fwk.Queue,
		},
		"a class for another extended resource changes": {
			kind: fwk.DeviceClass, action: fwk.Update, pod: extendedPod("p", "example.com/gpu"),
			old: extendedClass("example.com/nic"), new: class("other"), want: fwk.QueueSkip,
		},
		"the class behind an implicit extended resource goes": {
			kind: fwk.DeviceClass, action: fwk.Delete, pod: extendedPod("p", v1.ResourceName(resourceapi.ResourceDeviceClassPrefix+"other")),
			old: class("other"), want: fwk.Queue,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := hintFor(tc.kind, tc.action)(klog.FromContext(h.ctx), tc.pod, tc.old, tc.new)
			if err != nil {
				t.Fatal(err)
			}
			if got != tc.want {
				t.Errorf("hint %v, want %v", got, tc.want)
			}
		})
	}
}
