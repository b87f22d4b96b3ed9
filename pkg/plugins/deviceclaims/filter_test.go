// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	fwk "k8s.io/kube-scheduler/framework"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/refusals"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/waiting"
)

func TestPreFilter(t *testing.T) {
	fullHouse := func(c *resourceapi.ResourceClaim) {
		for i := range resourceapi.ResourceClaimReservedForMaxSize {
			reservedFor(fmt.Sprintf("pod-%d", i))(c)
		}
	}
	w := twoNodes()
	w.nodes = append(w.nodes, node("node-c"))
	w.objects = append(w.objects, slice("node-c", device("gpu-0")))
	w.claims = []*resourceapi.ResourceClaim{
		claim("free"),
		claim("flying"),
		claim("on-a", allocated("node-a", "gpu-0"), reservedFor("somebody")),
		claim("on-b", allocated("node-b", "gpu-0")),
		claim("everywhere", allocated("node-b", "gpu-1"), func(c *resourceapi.ResourceClaim) { c.Status.Allocation.NodeSelector = nil }),
		claim("full", allocated("node-a", "gpu-0"), fullHouse),
		claim("classless", withClass("nonsense")),
		claim("unreadable", withSelector(`device.driver ==`)),
		claim("leaving", deleting),
		claim("generated", ownedBy(pod("owner"))),
	}
	h := newHarness(t, w)
	h.filterAll(pod("pilot", "flying")).reserve("node-c")

	tests := map[string]struct {
		pod      *v1.Pod
		wantCode fwk.Code
		// want are parts of the reason.
		want  []string
		nodes []string
	}{
		"a pod without claims is not this plugin's business": {
			pod: pod("p"), wantCode: fwk.Skip,
		},
		"an unallocated claim may go anywhere": {
			pod: pod("p", "free"),
		},
		"an allocated claim leads to its node": {
			pod: pod("p", "on-a"), nodes: []string{"node-a"},
		},
		"an allocated claim without node selector leads nowhere": {
			pod: pod("p", "everywhere"),
		},
		"claims allocated on different nodes leave no node": {
			pod: pod("p", "on-a", "on-b"), wantCode: fwk.UnschedulableAndUnresolvable,
			want: []string{"claim team-a/on-a is allocated on node node-a, claim team-a/on-b is allocated on node node-b: no node can use all of them"},
		},
		"a claim with as many users as possible is refused to a new one": {
			pod: pod("p", "full"), wantCode: fwk.UnschedulableAndUnresolvable,
			want: []string{"claim team-a/full is already reserved for 256 pods, the limit is 256"},
		},
		"a claim with as many users as possible is not refused to one of them": {
			pod: pod("pod-17", "full"), nodes: []string{"node-a"},
		},
		"a claim that is being allocated for another pod has to be waited for": {
			pod: pod("p", "flying"), wantCode: fwk.UnschedulableAndUnresolvable,
			want: []string{"claim team-a/flying, which the pod shares with pod pilot, is being allocated: the pod is tried again with it"},
		},
		"a class that does not exist is named with claim and request": {
			pod: pod("p", "classless"), wantCode: fwk.UnschedulableAndUnresolvable,
			want: []string{"team-a/classless", `"gpu"`, "nonsense"},
		},
		"a selector that does not compile is named with claim and request": {
			pod: pod("p", "unreadable"), wantCode: fwk.UnschedulableAndUnresolvable,
			want: []string{"team-a/unreadable", `"gpu"`, "selectors[0]", "device.driver =="},
		},
		"a claim being deleted is refused": {
			pod: pod("p", "leaving"), wantCode: fwk.UnschedulableAndUnresolvable,
			want: []string{"claim team-a/leaving is being deleted"},
		},
		"a claim that has gone is refused": {
			pod: pod("p", "gone"), wantCode: fwk.UnschedulableAndUnresolvable,
			want: []string{"claim team-a/gone does not exist"},
		},
		"a generated claim of another pod is refused": {
			pod: templatePod("p", "generated"), wantCode: fwk.UnschedulableAndUnresolvable,
			want: []string{"team-a/generated was not created for Pod team-a/p"},
		},
		"a pod with claims for CPU of a node is refused": {
			pod: func() *v1.Pod {
				p := pod("p", "free")
				p.Status.NodeAllocatableResourceClaimStatuses = []v1.NodeAllocatableResourceClaimStatus{{}}
				return p
			}(),
			wantCode: fwk.UnschedulableAndUnresolvable,
			want:     []string{"nodeAllocatableResourceClaimStatuses"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			a := h.filterAll(tc.pod)
			if a.preFilter.Code() != tc.wantCode {
				t.Errorf("code %v, want %v", a.preFilter.Code(), tc.wantCode)
			}
			for _, want := range tc.want {
				if !strings.Contains(a.preFilter.Message(), want) {
					t.Errorf("reason %q does not contain %q", a.preFilter.Message(), want)
				}
			}
			var want *fwk.PreFilterResult
			if tc.nodes != nil {
				want = &fwk.PreFilterResult{NodeNames: sets.New(tc.nodes...)}
			}
			if diff := cmp.Diff(want, a.limit); diff != "" {
				t.Errorf("nodes differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFilter(t *testing.T) {
	pluginNode := func(n *v1.Node) { n.Status.Allocatable = v1.ResourceList{"example.com/gpu": resource.MustParse("4")} }
	w := twoNodes()
	w.nodes = append(w.nodes, node("node-c"), node("node-d"), node("node-p", pluginNode))
	incomplete := slice("node-c", device("gpu-0", withModel("A100")))
	incomplete.Spec.Pool.ResourceSliceCount = 2
	w.objects = append(w.objects, incomplete, slice("node-d", device("gpu-0"))) // node-d's device has no model
	w.resolver = map[v1.ResourceName]string{"example.com/gpu": "gpu"}
	w.claims = []*resourceapi.ResourceClaim{
		claim("any"),
		claim("two", func(c *resourceapi.ResourceClaim) { c.Spec.Devices.Requests[0].Exactly.Count = 2 }),
		claim("model", withSelector(`device.attributes["gpu.example.com"].model in ["A100", "H100"]`)),
		claim("holder", allocated("node-a", "gpu-0")),
		claim("labelled", allocated("node-b", "gpu-0"), func(c *resourceapi.ResourceClaim) {
			c.Status.Allocation.NodeSelector = &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
				MatchExpressions: []v1.NodeSelectorRequirement{{Key: "rack", Operator: v1.NodeSelectorOpExists}},
			}}}
		}),
	}
	h := newHarness(t, w)
	const tooMany = "node(s) refused: the pod needs 33 devices for its extended resources, and one claim, which all of them come from, can get 32"
	tests := map[string]struct {
		pod  *v1.Pod
		want map[string]string
	}{
		"held devices, an incomplete pool and a missing one rule out their nodes only": {
			pod: pod("p", "any"),
			want: map[string]string{
				"node-a": explain.ReasonHeld.OfNodes(),
				"node-b": "",
				"node-c": explain.ReasonPool.OfNodes(),
				"node-d": "",
				"node-p": explain.ReasonNoMatch.OfNodes(),
			},
		},
		"a selector that fails on one node's device rules out that node only": {
			pod: pod("p", "model"),
			want: map[string]string{
				"node-a": explain.ReasonHeld.OfNodes(),
				"node-b": "",
				"node-c": explain.ReasonPool.OfNodes(),
				"node-d": explain.ReasonSelectorError.OfNodes(),
				"node-p": explain.ReasonNoMatch.OfNodes(),
			},
		},
		"an allocation that no node satisfies any more rules out all": {
			pod: pod("p", "labelled"),
			want: map[string]string{
				"node-a": refusals.ReasonElsewhere, "node-b": refusals.ReasonElsewhere, "node-c": refusals.ReasonElsewhere, "node-d": refusals.ReasonElsewhere, "node-p": refusals.ReasonElsewhere,
			},
		},
		"an extended resource behind which is a class comes from claims where there is no device plugin": {
			pod: extendedPod("p", "example.com/gpu"),
			want: map[string]string{
				"node-a": explain.ReasonHeld.OfNodes(), "node-b": "", "node-c": explain.ReasonPool.OfNodes(), "node-d": "", "node-p": "",
			},
		},
		"more devices than one claim can get": {
			pod: containersPod("a=20", "b=13"), // of example.com/gpu
			want: map[string]string{
				"node-a": tooMany, "node-b": tooMany, "node-c": tooMany, "node-d": tooMany, "node-p": "",
			},
		},
		"other extended resources are left to the plugin for requests": {
			pod:  extendedPod("p", "example.com/nic"),
			want: map[string]string{"node-a": "", "node-b": "", "node-c": "", "node-d": "", "node-p": ""},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			a := h.filterAll(tc.pod)
			if !a.preFilter.IsSuccess() {
				t.Fatalf("PreFilter: %v", a.preFilter)
			}
			if diff := cmp.Diff(tc.want, a.filter); diff != "" {
				t.Errorf("reasons differ (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFilterRefusalsCannotBeResolvedByPreemption(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("two", func(c *resourceapi.ResourceClaim) { c.Spec.Devices.Requests[0].Exactly.Count = 3 })}
	h := newHarness(t, w)
	a := h.filterAll(pod("p", "two"))
	for _, node := range h.nodes {
		if status := h.plugin.Filter(h.ctx, a.state, a.pod, node); status.Code() != fwk.UnschedulableAndUnresolvable {
			t.Errorf("node %s: %v", node.Node().Name, status)
		}
	}
}

func TestFilterStopsWithItsCaller(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("any")}
	h := newHarness(t, w)
	a := &attempt{h: h, pod: pod("p", "any"), state: framework.NewCycleState()}
	if _, status := h.plugin.PreFilter(h.ctx, a.state, a.pod, h.nodes); !status.IsSuccess() {
		t.Fatal(status)
	}
	ctx, cancel := context.WithCancelCause(h.ctx)
	cancel(errors.New("enough nodes found"))
	status := h.plugin.Filter(ctx, a.state, a.pod, h.nodes[0])
	if want := "stopped by the caller: enough nodes found"; status.Message() != want {
		t.Errorf("reason %q, want %q", status.Message(), want)
	}
}

func TestCloneKeepsItsFindingsToItself(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("preferred", prioritized)}
	h := newHarness(t, w)
	a := h.filterAll(pod("p", "preferred"))
	original, err := cycle.Read(a.state)
	if err != nil {
		t.Fatal(err)
	}
	cloned, err := cycle.Read(a.state.Clone())
	if err != nil {
		t.Fatal(err)
	}
	inherited, _ := cloned.Results.Get("node-b")
	want, _ := original.Results.Get("node-b")
	if inherited != want || want.Score == 0 {
		t.Errorf("the clone has score %d for node-b, the original %d", inherited.Score, want.Score)
	}
	cloned.Results.Set("node-b", cycle.NodeResult{Score: 99})
	if got, _ := original.Results.Get("node-b"); got != want {
		t.Errorf("a result of the clone, %+v, appears in the original", got)
	}
}

// prioritized prefers an H100 over any other GPU.
func prioritized(c *resourceapi.ResourceClaim) {
	sub := func(name, expression string) resourceapi.DeviceSubRequest {
		return resourceapi.DeviceSubRequest{
			Name: name, DeviceClassName: testClass, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
			Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}},
		}
	}
	c.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{
		sub("best", `device.attributes["gpu.example.com"].model == "H100"`),
		sub("other", `true`),
	}}}
}

func TestScorePrefersEarlierAlternatives(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("preferred", prioritized)}
	h := newHarness(t, w)
	a := h.filterAll(pod("p", "preferred"))
	var scores fwk.NodeScoreList
	for _, node := range h.nodes {
		score, status := h.plugin.Score(h.ctx, a.state, a.pod, node)
		if !status.IsSuccess() {
			t.Fatal(status)
		}
		scores = append(scores, fwk.NodeScore{Name: node.Node().Name, Score: score})
	}
	if status := h.plugin.NormalizeScore(h.ctx, a.state, a.pod, scores); !status.IsSuccess() {
		t.Fatal(status)
	}
	// 8 for the first alternative, 7 for the second one, and less than a tenth for all or half of the devices being held.
	want := fwk.NodeScoreList{{Name: "node-a", Score: 88}, {Name: "node-b", Score: 100}}
	if diff := cmp.Diff(want, scores); diff != "" {
		t.Errorf("scores differ (-want +got):\n%s", diff)
	}
}

// Among nodes with equal alternatives those come first that give the pod smaller devices, whatever else is held; and those where more is
// held among them.
func TestScorePrefersSmallDevices(t *testing.T) {
	large, small := resource.MustParse("80Gi"), resource.MustParse("16Gi")
	of := func(memory *resource.Quantity) func(*resourceapi.Device) {
		return func(d *resourceapi.Device) {
			if memory != nil {
				d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: *memory}}
			}
		}
	}
	none := (*resource.Quantity)(nil)
	for name, tc := range map[string]struct {
		memory [3]*resource.Quantity // of the devices of the three nodes, of which the first one has one held
		failed string
		want   []int64
	}{
		"all equal: occupancy alone":              {memory: [3]*resource.Quantity{&small, &small, &small}, want: []int64{100, 49, 49}},
		"the first is large":                      {memory: [3]*resource.Quantity{&large, &small, &small}, want: []int64{66, 100, 100}},
		"only one is small":                       {memory: [3]*resource.Quantity{&large, &small, &large}, want: []int64{66, 100, 33}},
		"of one nothing is known":                 {memory: [3]*resource.Quantity{&large, &small, none}, want: []int64{100, 49, 49}},
		"devices of the small one failed the pod": {memory: [3]*resource.Quantity{&large, &small, &large}, failed: "node-1", want: []int64{100, 0, 50}},
	} {
		t.Run(name, func(t *testing.T) {
			w := world{objects: []runtime.Object{class(testClass)}}
			for i, memory := range tc.memory {
				name := fmt.Sprintf("node-%d", i)
				w.nodes = append(w.nodes, node(name))
				w.objects = append(w.objects, slice(name, device("gpu-0", of(memory)), device("gpu-1", of(memory))))
			}
			w.claims = []*resourceapi.ResourceClaim{claim("c"), claim("held", allocated("node-0", "gpu-0"), reservedFor("other"))}
			h := newHarness(t, w)
			p := pod("p", "c")
			if tc.failed != "" {
				h.plugin.shared.memory.Failed.Add(p, tc.failed, nil)
			}
			a := h.filterAll(p)
			var scores fwk.NodeScoreList
			for _, node := range h.nodes {
				score, status := h.plugin.Score(h.ctx, a.state, p, node)
				if !status.IsSuccess() {
					t.Fatal(status)
				}
				scores = append(scores, fwk.NodeScore{Name: node.Node().Name, Score: score})
			}
			if status := h.plugin.NormalizeScore(h.ctx, a.state, p, scores); !status.IsSuccess() {
				t.Fatal(status)
			}
			var got []int64
			for _, score := range scores {
				got = append(got, score.Score)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("scores differ (-want +got):\n%s", diff)
			}
		})
	}
}

// Nodes with worse alternatives come no closer to the best ones because they give smaller devices.
func TestSizeMattersAmongTheBestAlternativesOnly(t *testing.T) {
	c := &cycle.State{Plan: &cycle.Plan{}, Results: cycle.NewResults(nil)}
	scores := fwk.NodeScoreList{
		{Name: "best-large", Score: 2 * allocator.PreferenceStep},
		{Name: "best-small", Score: 2 * allocator.PreferenceStep},
		{Name: "worse-smallest", Score: allocator.PreferenceStep},
		{Name: "worse-unknown", Score: allocator.PreferenceStep},
	}
	for i, size := range []int64{80, 40, 16, 0} {
		c.Results.Set(scores[i].Name, cycle.NodeResult{Size: size})
	}
	preferSmall(c, scores)
	want := fwk.NodeScoreList{
		{Name: "best-large", Score: 2 * allocator.PreferenceStep},
		{Name: "best-small", Score: 2*allocator.PreferenceStep + sizeStep},
		{Name: "worse-smallest", Score: allocator.PreferenceStep},
		{Name: "worse-unknown", Score: allocator.PreferenceStep},
	}
	if diff := cmp.Diff(want, scores); diff != "" {
		t.Errorf("scores (-want +got):\n%s", diff)
	}
}

func TestPostFilter(t *testing.T) {
	// A device of node-b, which only nodes with a label of their own may use.
	moved := func(c *resourceapi.ResourceClaim) {
		allocated("node-b", "gpu-0")(c)
		c.Status.Allocation.NodeSelector.NodeSelectorTerms[0] = v1.NodeSelectorTerm{
			MatchExpressions: []v1.NodeSelectorRequirement{{Key: "rack", Operator: v1.NodeSelectorOpExists}},
		}
	}
	tests := map[string]struct {
		claims   []*resourceapi.ResourceClaim
		pod      *v1.Pod
		fault    error
		wantCode fwk.Code
		want     []string
		// gone is the claim that must have lost its allocation.
		gone string
	}{
		"an allocation that pins the pod and is used by nobody else is given up": {
			claims:   []*resourceapi.ResourceClaim{claim("mine", allocated("node-a", "gpu-0"), reservedFor("p"))},
			pod:      pod("p", "mine"),
			wantCode: fwk.UnschedulableAndUnresolvable,
			want:     []string{"gave up the allocation of claim team-a/mine"},
			gone:     "mine",
		},
		"an allocation that rules out nodes by labels is given up": {
			claims:   []*resourceapi.ResourceClaim{claim("mine", moved)},
			pod:      pod("p", "mine"),
			wantCode: fwk.UnschedulableAndUnresolvable,
			want:     []string{"gave up the allocation of claim team-a/mine"},
			gone:     "mine",
		},
		"an allocation that another pod uses stays": {
			claims:   []*resourceapi.ResourceClaim{claim("mine", allocated("node-a", "gpu-0"), reservedFor("p", "other"))},
			pod:      pod("p", "mine"),
			wantCode: fwk.Unschedulable, // on to preemption
		},
		"an allocation that can be used everywhere stays": {
			claims: []*resourceapi.ResourceClaim{claim("mine", allocated("node-a", "gpu-0"), func(c *resourceapi.ResourceClaim) {
				c.Status.Allocation.NodeSelector = nil
			})},
			pod:      pod("p", "mine"),
			wantCode: fwk.Unschedulable, // on to preemption
		},
		"without an allocation, the missing devices are explained": {
			claims: []*resourceapi.ResourceClaim{
				claim("mine"),
				claim("holder-a", allocated("node-a", "gpu-0")),
				claim("holder-b", allocated("node-b", "gpu-0", "gpu-1")),
			},
			pod:      pod("p", "mine"),
			wantCode: fwk.Unschedulable, // on to preemption
			want: []string{
				`request "gpu" of claim mine: 3 of 3 gpu devices held`, "would fit on node node-a if claim team-a/holder-a were released",
			},
		},
		"the pod's own claims are not among those whose release would help": {
			claims: []*resourceapi.ResourceClaim{
				claim("first", allocated("node-b", "gpu-0"), reservedFor("p", "other")),
				claim("second"),
				claim("stranger", allocated("node-b", "gpu-1")),
			},
			pod:      pod("p", "first", "second"),
			wantCode: fwk.Unschedulable, // on to preemption
			want:     []string{"would fit on node node-b if claim team-a/stranger were released"},
		},
		"devices that stand for CPU of a node are refused, and it is said why": {
			claims:   []*resourceapi.ResourceClaim{claim("mine", withClass("cpus"))},
			pod:      pod("p", "mine"),
			wantCode: fwk.Unschedulable, // on to preemption
			want:     []string{"1 of 1 cpus devices standing for CPU or memory of a node", "only kube-scheduler itself"},
		},
		"a pod without claims is left to others": {
			pod:      pod("p"),
			wantCode: fwk.Unschedulable,
		},
		"an API server that fails is an error": {
			claims:   []*resourceapi.ResourceClaim{claim("mine", allocated("node-a", "gpu-0"))},
			pod:      pod("p", "mine"),
			fault:    errors.New("no route to host"),
			wantCode: fwk.Error,
			want:     []string{"team-a/mine", "no route to host"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			cpus := slice("node-a", device("cpus-0", func(d *resourceapi.Device) {
				d.NodeAllocatableResources = map[v1.ResourceName]resourceapi.NodeAllocatableResource{v1.ResourceCPU: {}}
			}))
			cpus.Name, cpus.Spec.Driver = "cpus", "cpu.example.com"
			ofCPUs := class("cpus")
			ofCPUs.Spec.Selectors[0].CEL.Expression = `device.driver == "cpu.example.com"`
			w.objects = append(w.objects, cpus, ofCPUs)
			w.claims, w.pods = tc.claims, []*v1.Pod{tc.pod}
			h := newHarness(t, w)
			h.api.onRequest(func(request string) error {
				if request == "update/status" {
					return tc.fault
				}
				return nil
			})
			a := h.filterAll(tc.pod)
			status := a.postFilter()
			if status.Code() != tc.wantCode {
				t.Errorf("code %v, want %v: %s", status.Code(), tc.wantCode, status.Message())
			}
			for _, want := range tc.want {
				if !strings.Contains(status.Message(), want) {
					t.Errorf("message %q does not contain %q", status.Message(), want)
				}
			}
			for _, c := range tc.claims {
				stored := h.api.get(c.Name)
				lost := c.Status.Allocation != nil && stored.Status.Allocation == nil
				if lost != (c.Name == tc.gone) {
					t.Errorf("claim %s: allocation given up: %t", c.Name, lost)
				}
				if lost && len(stored.Status.ReservedFor)+len(stored.Status.Devices) > 0 {
					t.Errorf("claim %s keeps a status of users and devices: %+v", c.Name, stored.Status)
				}
			}
			if tc.gone != "" {
				h.wakes("p")
			}
		})
	}
}

// Of a node that is too small for the pod in another way, nobody is told that the release of its devices would help.
func TestNobodyIsToldToReleaseDevicesOfANodeThatIsTooSmall(t *testing.T) {
	for name, tc := range map[string]struct {
		asks        []string // CPU of the containers
		resource    v1.ResourceName
		withoutRule bool
		tooSmall    bool
	}{
		"nothing else":                     {},
		"as much CPU as there is":          {asks: []string{"2", "2"}},
		"more CPU than there is":           {asks: []string{"2", "2001m"}, tooSmall: true},
		"CPU without end":                  {asks: []string{"1e2147483647"}, tooSmall: true},
		"a resource that nobody reports":   {asks: []string{"1"}, resource: v1.ResourceMemory},
		"more CPU, and nobody looks at it": {asks: []string{"1000"}, withoutRule: true},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.resource == "" {
				tc.resource = v1.ResourceCPU
			}
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{
				claim("mine"), claim("holder-a", allocated("node-a", "gpu-0")), claim("holder-b", allocated("node-b", "gpu-0", "gpu-1")),
			}
			p := pod("p", "mine")
			p.Spec.Containers = nil
			for _, cpu := range tc.asks {
				p.Spec.Containers = append(p.Spec.Containers, v1.Container{Resources: v1.ResourceRequirements{
					Requests: v1.ResourceList{tc.resource: resource.MustParse(cpu)},
				}})
			}
			h := newHarness(t, w)
			for _, node := range h.nodes {
				node.Node().Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse("4")}
			}
			if !tc.withoutRule {
				h.checksResources()
			}
			message := h.filterAll(p).postFilter().Message()
			if told := strings.Contains(message, "would fit on node"); told == tc.tooSmall || !strings.Contains(message, "3 of 3 gpu devices held") {
				t.Errorf("told %q, want whose release would help: %t", message, !tc.tooSmall)
			}
		})
	}
}

// Only so many nodes are looked at closely. Those that are too small do not count.
func TestNodesThatAreTooSmallHideNoOther(t *testing.T) {
	const small = 20
	w := twoNodes()
	w.nodes, w.objects, w.claims = nil, []runtime.Object{class(testClass)}, []*resourceapi.ResourceClaim{claim("mine")}
	for i := range small + 1 {
		name := fmt.Sprintf("node-%02d", i)
		w.nodes = append(w.nodes, node(name))
		w.objects = append(w.objects, slice(name, device("gpu-0")))
		w.claims = append(w.claims, claim(fmt.Sprint("holder-", i), allocated(name, "gpu-0")))
	}
	p := pod("p", "mine")
	p.Spec.Containers = []v1.Container{{Resources: v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("8")}}}}
	h := newHarness(t, w)
	for i, n := range h.nodes {
		cpu := "4"
		if i == small {
			cpu = "64"
		}
		n.Node().Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu)}
	}
	h.checksResources()
	if got := h.filterAll(p).postFilter().Message(); !strings.Contains(got, "would fit on node node-20") {
		t.Errorf("told %q, want that node-20 would do", got)
	}
}

// withResourcesFit is the handle of a profile that has the plugin NodeResourcesFit.
type withResourcesFit struct{ fwk.Handle }

func (withResourcesFit) ListPlugins() *schedulerconfig.Plugins {
	return &schedulerconfig.Plugins{Filter: schedulerconfig.PluginSet{Enabled: []schedulerconfig.Plugin{{Name: names.NodeResourcesFit}}}}
}

func (withResourcesFit) QueueSortFunc() fwk.LessFunc { return nil }

// checksResources gives the profile that plugin.
func (h *harness) checksResources() {
	*h.plugin.setup = *waiting.NewSetup(withResourcesFit{h.plugin.handle})
}

func TestPostFilterLeavesAClaimThatHasChanged(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("mine", allocated("node-a", "gpu-0"))}
	h := newHarness(t, w)
	a := h.filterAll(pod("p", "mine"))
	h.api.change("mine", reservedFor("other"))
	status := a.postFilter()
	if want := "claim team-a/mine has changed"; status.Code() != fwk.Unschedulable || status.Message() != want {
		t.Errorf("status %v, want %q", status, want)
	}
	if h.api.get("mine").Status.Allocation == nil {
		t.Error("the allocation is gone although another pod uses it")
	}
}
