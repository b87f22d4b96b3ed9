// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

const class = "gpu.example.com"

// rig builds a world step by step; every node has one pool with its own name and one slice.
func rig() *world {
	return &world{classes: []*resourceapi.DeviceClass{{
		ObjectMeta: metav1.ObjectMeta{Name: class},
		Spec: resourceapi.DeviceClassSpec{Selectors: []resourceapi.DeviceSelector{{
			CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "a.example.com"`},
		}}},
	}}}
}

func (w *world) node(name string, devices ...resourceapi.Device) *world {
	w.nodes = append(w.nodes, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
	w.slices = append(w.slices, &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driverA, NodeName: ptr.To(name), Devices: devices,
			Pool: resourceapi.ResourcePool{Name: name, Generation: 1, ResourceSliceCount: 1},
		},
	})
	return w
}

func (w *world) hold(devices ...string) *world {
	for _, device := range devices {
		pool, name, _ := strings.Cut(device, "/")
		w.held = append(w.held, usage.DeviceID{Driver: driverA, Pool: pool, Device: name})
	}
	return w
}

func (w *world) claim(name string, requests ...resourceapi.DeviceRequest) *world {
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)}}
	claim.Spec.Devices.Requests = requests
	w.claims = append(w.claims, claim)
	return w
}

func (w *world) matchAttribute(name string) *world {
	devices := &w.claims[len(w.claims)-1].Spec.Devices
	devices.Constraints = append(devices.Constraints, resourceapi.DeviceConstraint{MatchAttribute: ptr.To(resourceapi.FullyQualifiedName(name))})
	return w
}

func exactly(name string, count int64, selectors ...string) resourceapi.DeviceRequest {
	exact := &resourceapi.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}
	for _, selector := range selectors {
		exact.Selectors = append(exact.Selectors, resourceapi.DeviceSelector{CEL: &resourceapi.CELDeviceSelector{Expression: selector}})
	}
	return resourceapi.DeviceRequest{Name: name, Exactly: exact}
}

func all(name string, selectors ...string) resourceapi.DeviceRequest {
	request := exactly(name, 0, selectors...)
	request.Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	return request
}

func gpus(n int, modify ...func(i int, d *resourceapi.Device)) []resourceapi.Device {
	devices := make([]resourceapi.Device, n)
	for i := range devices {
		devices[i] = resourceapi.Device{
			Name: fmt.Sprintf("gpu-%d", i),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"index": {IntValue: ptr.To(int64(i))},
				"root":  {StringValue: ptr.To(fmt.Sprintf("root-%d", i/2))},
			},
		}
		for _, fn := range modify {
			fn(i, &devices[i])
		}
	}
	return devices
}

func taint(key string, which ...int) func(int, *resourceapi.Device) {
	return func(i int, d *resourceapi.Device) {
		for _, w := range which {
			if i == w {
				d.Taints = append(d.Taints, resourceapi.DeviceTaint{Key: key, Effect: resourceapi.DeviceTaintEffectNoSchedule})
			}
		}
	}
}

func without(attribute resourceapi.QualifiedName, which ...int) func(int, *resourceapi.Device) {
	return func(i int, d *resourceapi.Device) {
		for _, w := range which {
			if i == w {
				delete(d.Attributes, attribute)
			}
		}
	}
}

func (w *world) compile(t *testing.T) (*Requests, Input) {
	t.Helper()
	view := w.store().View()
	requests, err := Compile(w.claims, view, DefaultFeatures())
	if err != nil {
		t.Fatal(err)
	}
	return requests, Input{Requests: requests, Inventory: view, Usage: w.usage()}
}

func (w *world) failures(t *testing.T, ctx context.Context) (*Requests, map[string]*Failure) {
	requests, in := w.compile(t)
	failures := make(map[string]*Failure)
	for _, node := range w.nodes {
		in.Node = node
		if result := Check(ctx, in); result.Failure != nil {
			failures[node.Name] = result.Failure
		}
	}
	return requests, failures
}

func TestReasonsPerNode(t *testing.T) {
	expired, cancel := context.WithDeadline(context.Background(), time.Unix(0, 0))
	defer cancel()
	incomplete := rig().node("n1", gpus(1)...).claim("c", exactly("gpu", 1))
	incomplete.slices[0].Spec.Pool.ResourceSliceCount = 2
	duplicate := rig().node("n1", append(gpus(1), gpus(1)...)...).claim("c", exactly("gpu", 1))
	badSelector := rig().node("n1", gpus(1)...).claim("c", exactly("gpu", 1))
	badSelector.slices[0].Spec.Pool.ResourceSliceCount = 2
	other := badSelector.slices[0].DeepCopy()
	other.Name, other.Spec.NodeName = "other", nil
	other.Spec.NodeSelector = &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{{Key: "a", Operator: "What"}}}}}
	other.Spec.Devices = nil
	badSelector.slices = append(badSelector.slices, other)
	noPartitions := rig().node("n1", gpus(1, consumes("set", "memory", "1"))...).claim("c", exactly("gpu", 1))
	noPartitions.features = func(f *inventory.Features) { f.PartitionableDevices = false }
	usedUp := rig().node("n1", gpus(2, consumes("set", "memory", "10"))...).counters("n1", "set", "memory", "15").hold("n1/gpu-0").claim("c", exactly("gpu", 1))
	full := rig().node("n1", gpus(1, shareable("memory", "10"))...).share("n1/gpu-0", "memory", "8").claim("c", takes(exactly("gpu", 1), "memory", "3"))
	tooSmall := rig().node("n1", gpus(1, shareable("memory", "10"))...).claim("c", takes(exactly("gpu", 1), "memory", "11"))
	fewAll := rig().node("n1", gpus(33)...).claim("c", all("gpu"))

	tests := map[string]struct {
		ctx        context.Context
		world      *world
		want       explain.Reason
		resolvable bool
	}{
		"no device matches":                {world: rig().node("n1", gpus(1)...).claim("c", exactly("gpu", 2)), want: explain.ReasonNoMatch},
		"device is held":                   {world: rig().node("n1", gpus(2)...).hold("n1/gpu-1").claim("c", exactly("gpu", 2)), want: explain.ReasonHeld, resolvable: true},
		"all devices, one held":            {world: rig().node("n1", gpus(2)...).hold("n1/gpu-1").claim("c", all("gpu")), want: explain.ReasonHeld, resolvable: true},
		"all devices, none there":          {world: rig().node("n1").claim("c", all("gpu")), want: explain.ReasonNoMatch},
		"all devices, one tainted":         {world: rig().node("n1", gpus(2, taint("lost", 1))...).claim("c", all("gpu")), want: explain.ReasonTainted},
		"all devices, more than 32":        {world: fewAll, want: explain.ReasonTooMany},
		"device is tainted":                {world: rig().node("n1", gpus(1, taint("lost", 0))...).claim("c", exactly("gpu", 1)), want: explain.ReasonTainted},
		"constraint":                       {world: rig().node("n1", gpus(4)...).claim("c", exactly("gpu", 3)).matchAttribute("a.example.com/root"), want: explain.ReasonConstraints},
		"constraint, and a device is held": {world: rig().node("n1", gpus(2)...).hold("n1/gpu-1").claim("c", exactly("a", 1), exactly("b", 1)), want: explain.ReasonConstraints, resolvable: true},
		"pool is incomplete":               {world: incomplete, want: explain.ReasonPool},
		"pool has a name twice":            {world: duplicate, want: explain.ReasonPool},
		"pool has a bad node selector":     {world: badSelector, want: explain.ReasonPool},
		"selector fails":                   {world: rig().node("n1", gpus(1, without("index", 0))...).claim("c", exactly("gpu", 1, `device.attributes["a.example.com"].index == 0`)), want: explain.ReasonSelectorError},
		"counters are not enabled":         {world: noPartitions, want: explain.ReasonUnsupported},
		"counters are used up":             {world: usedUp, want: explain.ReasonHeld, resolvable: true},
		"capacity is used up":              {world: full, want: explain.ReasonHeld, resolvable: true},
		"capacity is too small":            {world: tooSmall, want: explain.ReasonNoMatch},
		"deadline is over":                 {ctx: expired, world: rig().node("n1", gpus(2)...).claim("c", exactly("a", 1), exactly("b", 1)), want: explain.ReasonUndecided},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if tc.ctx == nil {
				tc.ctx = context.Background()
			}
			_, failures := tc.world.failures(t, tc.ctx)
			f := failures["n1"]
			if f == nil {
				t.Fatal("the node was not refused")
			}
			if f.Reason != tc.want || f.Resolvable() != tc.resolvable {
				t.Errorf("got %q, resolvable %v; want %q, %v", f, f.Resolvable(), tc.want, tc.resolvable)
			}
		})
	}
}

// TestAllNeedsEveryPool: what "all devices of the node" are is not known while a pool is incomplete, whether or not
// the devices of the other pools can be judged.
func TestAllNeedsEveryPool(t *testing.T) {
	for name, selectors := range map[string][]string{
		"no selector": nil, "a selector that fails": {`device.attributes["a.example.com"].missing == 0`},
	} {
		t.Run(name, func(t *testing.T) {
			w := rig().node("n1", gpus(2)...).claim("c", all("gpu", selectors...))
			other := w.slices[0].DeepCopy()
			other.Name = "other"
			other.Spec.Pool = resourceapi.ResourcePool{Name: "other", Generation: 1, ResourceSliceCount: 2}
			w.slices = append(w.slices, other)
			_, in := w.compile(t)
			in.Node = w.nodes[0]
			for name, decide := range map[string]func(context.Context, Input) Result{"Check": Check, "Allocate": Allocate} {
				if f := decide(context.Background(), in).Failure; f == nil || f.Reason != explain.ReasonPool {
					t.Errorf("%s: got %v, want %q", name, f, explain.ReasonPool)
				}
			}
		})
	}
}

// TestAllNeedsEveryDeviceJudged: a device that cannot be judged is the reason, whatever is held in pools before it.
func TestAllNeedsEveryDeviceJudged(t *testing.T) {
	for name, change := range map[string]func(w *world){
		"held": func(w *world) { w.hold("n1/gpu-0") }, "tainted": func(w *world) { taint("lost", 0)(0, &w.slices[0].Spec.Devices[0]) },
	} {
		t.Run(name, func(t *testing.T) {
			w := rig().node("n1", gpus(1)...).claim("c", all("gpu", `device.attributes["a.example.com"].index == 0`))
			other := w.slices[0].DeepCopy()
			other.Name, other.Spec.Pool.Name = "other", "other"
			w.slices = append(w.slices, other)
			without("index", 0)(0, &other.Spec.Devices[0])
			change(w)
			_, in := w.compile(t)
			in.Node = w.nodes[0]
			if first := in.Inventory.ForNode(in.Node).Pools[0].ID().Pool; first != "n1" {
				t.Fatalf("the first pool is %s", first)
			}
			for name, decide := range map[string]func(context.Context, Input) Result{"Check": Check, "Allocate": Allocate} {
				if f := decide(context.Background(), in).Failure; f == nil || f.Reason != explain.ReasonSelectorError {
					t.Errorf("%s: got %v, want %q", name, f, explain.ReasonSelectorError)
				}
			}
		})
	}
}

func TestUsageDecidesNotWhatWasSeenBefore(t *testing.T) {
	w := rig().node("n1", gpus(2)...).claim("c", exactly("gpu", 1))
	_, in := w.compile(t)
	in.Node = w.nodes[0]
	for _, tc := range []struct {
		held []string
		want string
	}{{nil, "gpu-0"}, {[]string{"n1/gpu-0"}, "gpu-1"}, {[]string{"n1/gpu-1"}, "gpu-0"}, {[]string{"n1/gpu-0"}, "gpu-1"}, {nil, "gpu-0"}} {
		w.held = nil
		in.Usage = w.hold(tc.held...).usage()
		if got := Allocate(context.Background(), in).Allocations[0].Devices.Results[0].Device; got != tc.want {
			t.Errorf("held %v: got %s, want %s", tc.held, got, tc.want)
		}
	}
}

func TestOneBadNodeLeavesTheOthersUsable(t *testing.T) {
	w := rig().node("bad", gpus(1, without("index", 0))...).node("incomplete", gpus(1)...).node("good", gpus(1)...)
	w.slices[1].Spec.Pool.ResourceSliceCount = 2
	w.claim("c", exactly("gpu", 1, `device.attributes["a.example.com"].index == 0`))
	_, failures := w.failures(t, context.Background())
	if failures["bad"] == nil || failures["incomplete"] == nil || failures["good"] != nil {
		t.Fatalf("refused: %v", failures)
	}
	e := failures["bad"].SelectorError
	if e == nil {
		t.Fatalf("no selector error in %v", failures["bad"])
	}
	got := []string{e.Namespace, e.Claim, e.Request, e.Expression, e.Driver, e.Pool, e.Device}
	want := []string{"default", "c", "gpu", `device.attributes["a.example.com"].index == 0`, driverA, "bad", "gpu-0"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if e.Err == nil || !strings.Contains(e.Err.Error(), "no such key: index") {
		t.Errorf("error: %v", e.Err)
	}
}

func TestCompileNamesWhatIsWrong(t *testing.T) {
	unknownClass := exactly("gpu", 1)
	unknownClass.Exactly.DeviceClassName = "missing"
	capacity := exactly("gpu", 1)
	capacity.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": {}}}
	mode := exactly("gpu", 1)
	mode.Exactly.AllocationMode = "Some"
	noCEL := exactly("gpu", 1)
	noCEL.Exactly.Selectors = []resourceapi.DeviceSelector{{}}
	admin := exactly("gpu", 1)
	admin.Exactly.AdminAccess = ptr.To(true)
	prioritized := resourceapi.DeviceRequest{Name: "gpu", FirstAvailable: []resourceapi.DeviceSubRequest{
		{Name: "best", DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
		{Name: "next", DeviceClassName: "missing", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1},
	}}
	badClass := rig().claim("c", exactly("gpu", 1))
	badClass.classes[0].Spec.Selectors[0].CEL.Expression = "nonsense"
	noCapacity := rig()
	noCapacity.features = func(f *inventory.Features) { f.ConsumableCapacity = false }
	emptyConstraint := rig().claim("c", exactly("gpu", 1))
	emptyConstraint.claims[0].Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{}}

	tests := map[string]struct {
		world    *world
		features func(*Features) // of the allocator
		want     ClaimError
	}{
		"class does not exist":                 {world: rig().claim("c", unknownClass), want: ClaimError{Request: "gpu", Field: "devices.requests[0].exactly.deviceClassName", Reason: `device class "missing" does not exist`}},
		"class of a subrequest does not exist": {world: rig().claim("c", prioritized), want: ClaimError{Request: "gpu/next", Field: "devices.requests[0].firstAvailable[1].deviceClassName", Reason: `device class "missing" does not exist`}},
		"selector does not compile":            {world: rig().claim("c", exactly("gpu", 1, "true", "nonsense")), want: ClaimError{Request: "gpu", Field: "devices.requests[0].exactly.selectors[1].cel.expression", Reason: "selector does not compile"}},
		"class selector does not compile":      {world: badClass, want: ClaimError{Request: "gpu", Class: class, Field: "selectors[0].cel.expression", Reason: "selector does not compile"}},
		"selector of another kind":             {world: rig().claim("c", noCEL), want: ClaimError{Request: "gpu", Field: "devices.requests[0].exactly.selectors[0]", Reason: "cel is not set, and other selectors are not supported"}},
		"request of another kind":              {world: rig().claim("c", resourceapi.DeviceRequest{Name: "gpu"}), want: ClaimError{Request: "gpu", Field: "devices.requests[0]", Reason: "neither exactly nor firstAvailable is set, and other types of requests are not supported"}},
		"constraint of another kind":           {world: emptyConstraint, want: ClaimError{Field: "devices.constraints[0]", Reason: "neither matchAttribute nor distinctAttribute is set, and other constraints are not supported"}},
		"allocation mode":                      {world: rig().claim("c", mode), want: ClaimError{Request: "gpu", Field: "devices.requests[0].exactly.allocationMode", Reason: `"Some" is not supported`}},
		"capacity":                             {world: noCapacity.claim("c", capacity), want: ClaimError{Request: "gpu", Field: "devices.requests[0].exactly.capacity", Reason: "the feature DRAConsumableCapacity is disabled"}},
		"too many devices":                     {world: rig().claim("c", exactly("a", 30), exactly("b", 3)), want: ClaimError{Request: "b", Field: "devices.requests[1]", Reason: "3 devices in addition to 30 of earlier requests are more than the 32 that one claim can get"}},
		"too many devices of one request":      {world: rig().claim("c", exactly("a", 57)), want: ClaimError{Request: "a", Field: "devices.requests[0]", Reason: "57 devices are more than the 32 that one claim can get"}},
		"admin access disabled":                {world: rig().claim("c", admin), features: func(f *Features) { f.AdminAccess = false }, want: ClaimError{Request: "gpu", Field: "devices.requests[0].exactly.adminAccess", Reason: "the feature DRAAdminAccess is disabled"}},
		"firstAvailable disabled":              {world: rig().claim("c", prioritized), features: func(f *Features) { f.PrioritizedList = false }, want: ClaimError{Request: "gpu", Field: "devices.requests[0].firstAvailable", Reason: "the feature DRAPrioritizedList is disabled"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			features := DefaultFeatures()
			if tc.features != nil {
				tc.features(&features)
			}
			_, err := Compile(tc.world.claims, tc.world.store().View(), features)
			var got *ClaimError
			if !errors.As(err, &got) {
				t.Fatalf("got %v, want a *ClaimError", err)
			}
			if (got.Err != nil) != (tc.want.Reason == "selector does not compile") {
				t.Errorf("underlying error: %v", got.Err)
			}
			tc.want.Namespace, tc.want.Claim, tc.want.Err = "default", "c", got.Err
			if diff := cmp.Diff(tc.want, *got, cmp.Comparer(func(a, b error) bool { return errors.Is(a, b) })); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestScorePrefersEarlierAlternatives(t *testing.T) {
	request := resourceapi.DeviceRequest{Name: "gpu"}
	for i, selector := range []string{"index == 0", "index == 1"} {
		sub := exactly("", 1, `device.attributes["a.example.com"].`+selector).Exactly
		request.FirstAvailable = append(request.FirstAvailable, resourceapi.DeviceSubRequest{
			Name: fmt.Sprintf("choice-%d", i), DeviceClassName: sub.DeviceClassName, AllocationMode: sub.AllocationMode, Count: 1, Selectors: sub.Selectors,
		})
	}
	w := rig().node("both", gpus(2)...).node("second", gpus(2)...).hold("second/gpu-0").claim("c", request)
	_, in := w.compile(t)
	got := make(map[string]int64)
	for _, node := range w.nodes {
		in.Node = node
		got[node.Name] = Check(context.Background(), in).Score
	}
	if diff := cmp.Diff(map[string]int64{"both": 8, "second": 7}, got); diff != "" {
		t.Error(diff)
	}
}

// TestImpossibleRequestsEndAtOnce has the shapes on which trying all combinations takes for ever.
func TestImpossibleRequestsEndAtOnce(t *testing.T) {
	cross := func(name string, mod, rest int) resourceapi.DeviceRequest {
		return exactly(name, 8, fmt.Sprintf(`device.attributes["a.example.com"].index %% %d == %d || device.attributes["a.example.com"].index %% 8 == 7`, mod, rest))
	}
	tests := map[string]*world{
		"21 of 20":                 rig().node("n1", gpus(20)...).claim("c", exactly("gpu", 21)),
		"21 of 20 in two requests": rig().node("n1", gpus(20)...).claim("c", exactly("a", 10), exactly("b", 11)),
		"25 of 24 that all differ": onlyFlow(),
		"12 of 24 equal ones that lead to no second request": jointly(24, 12, false),
		"21 of 20 in 21 claims":                              manyClaims(rig().node("n1", gpus(20)...), 21),
		"4 requests with crossed selectors":                  rig().node("n1", gpus(64)...).claim("c", cross("a", 8, 0), cross("b", 8, 0), cross("c", 8, 1), cross("d", 8, 1)),
		"matchAttribute without solution":                    rig().node("n1", gpus(128)...).claim("c", exactly("gpu", 3)).matchAttribute("a.example.com/root"),
		"matchAttribute, values in two pools":                rig().node("n1", gpus(128)...).claim("c", exactly("a", 1), exactly("b", 2)).matchAttribute("a.example.com/root"),
		"a second claim that cannot be had":                  rig().node("n1", gpus(64)...).claim("c", exactly("a", 8), exactly("b", 8)).claim("d", exactly("gpu", 3)).matchAttribute("a.example.com/root"),
	}
	for name, w := range tests {
		t.Run(name, func(t *testing.T) {
			_, in := w.compile(t)
			in.Node = w.nodes[0]
			Check(context.Background(), in) // evaluate the selectors
			// Trying all combinations takes longer than that on any machine.
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
			defer cancel()
			start := time.Now()
			result := Check(ctx, in)
			t.Logf("%v: %v", time.Since(start), result.Failure)
			if result.Failure == nil || result.Failure.Reason == explain.ReasonUndecided {
				t.Fatalf("got %v, want a refusal", result.Failure)
			}
		})
	}
}

// onlyFlow has devices that all differ in an attribute that matters to a third request, and one too few of them
// for the first two.
func onlyFlow() *world {
	w := rig().node("n1", gpus(25)...).claim("c", exactly("a", 12, "true"), exactly("b", 14), exactly("c", 1))
	w.claims[0].Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{
		Requests: []string{"c"}, DistinctAttribute: ptr.To(resourceapi.FullyQualifiedName("a.example.com/index")),
	}}
	return w
}

// jointly has a first request for some of n equal devices, which are on numa 0, or also for one on numa 1, and a
// second request on the same numa as the first, for two devices with equal link, equal slot and different rack. On
// numa 0 there are such for any two of these three, but no two for all; on numa 1 there are.
func jointly(n, wanted int, also bool) *world {
	var devices []resourceapi.Device
	add := func(kind string, numa int64, link, slot, rack string) {
		devices = append(devices, resourceapi.Device{Name: fmt.Sprintf("device-%d", len(devices)), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"kind": {StringValue: &kind}, "numa": {IntValue: &numa}, "link": {StringValue: &link}, "slot": {StringValue: &slot}, "rack": {StringValue: &rack},
		}})
	}
	for range n {
		add("first", 0, "x", "x", "x")
	}
	if also {
		add("first", 1, "x", "x", "x")
	}
	add("second", 0, "a", "s", "1")
	add("second", 0, "a", "s", "1")
	add("second", 0, "a", "t", "2")
	add("second", 0, "b", "s", "2")
	add("second", 1, "a", "s", "1")
	add("second", 1, "a", "s", "2")
	of := func(kind string) string { return fmt.Sprintf(`device.attributes["a.example.com"].kind == %q`, kind) }
	w := rig().node("n1", devices...).claim("c", exactly("first", int64(wanted), of("first")), exactly("second", 2, of("second")))
	attribute := func(name string) *resourceapi.FullyQualifiedName {
		return ptr.To(resourceapi.FullyQualifiedName("a.example.com/" + name))
	}
	w.claims[0].Spec.Devices.Constraints = []resourceapi.DeviceConstraint{
		{MatchAttribute: attribute("numa")},
		{Requests: []string{"second"}, MatchAttribute: attribute("link")},
		{Requests: []string{"second"}, MatchAttribute: attribute("slot")},
		{Requests: []string{"second"}, DistinctAttribute: attribute("rack")},
	}
	return w
}

// TestADeadEndHoldsOnlyForTheSameValues: that the second request is impossible on one numa says nothing about another.
func TestADeadEndHoldsOnlyForTheSameValues(t *testing.T) {
	w := jointly(2, 1, true)
	_, in := w.compile(t)
	in.Node = w.nodes[0]
	result := Allocate(context.Background(), in)
	if !result.Fits() {
		t.Fatal(result.Failure)
	}
	want, err := allocateUpstream(newUpstream(t, w), in.Node, w.claims, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, result.Allocations); diff != "" {
		t.Error(diff)
	}
}

func manyClaims(w *world, n int) *world {
	for i := range n {
		w.claim(fmt.Sprintf("claim-%d", i), exactly("gpu", 1))
	}
	return w
}
