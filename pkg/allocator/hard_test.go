// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// TestHardRequestsTakeFewSteps has one world for each kind of request that a search has no end with unless it has the
// shortcut that the name tells. What is counted is steps, which do not depend on the machine.
func TestHardRequestsTakeFewSteps(t *testing.T) {
	for name, tc := range map[string]struct {
		world *world
		steps int // at most
		fits  bool
	}{
		"equal roots: 14 claims want a root each, 13 are whole":                          {hardRoots(), 100, false},
		"values of two constraints together: no root has both kinds on one rack":         {hardValues(), 100, false},
		"values of three constraints together: no two devices are alike in all":          {hardTriples(), 100, false},
		"values of three constraints together, and no flow alone tells":                  {hardTriples().distinct("kind", "kind-0"), 100, false},
		"values and a flow: three requests on one numa, each kind is scarce":             {hardFlow(), 100, false},
		"different values by a flow: three requests want 6 of 5 racks":                   {hardDistinct(), 100, false},
		"equal devices in any order: 10 of three kinds that alternate":                   {hardOrder(), 2000, false},
		"equal requests: 10 want 2 devices of one rack, 9 racks have 2":                  {hardTwins(), 200, false},
		"a choice of 8 for each of 9 requests, and one kind too few":                     {hardChoice(9), 6000, false},
		"admin access beside what is impossible":                                         {hardAdmin(), 300, false},
		"partitions: 6 of 3g, 6 of 2g and 8 of 1g do not go into 4 GPUs":                 {hardPartitions(4, 6, 6, 8), 100, false},
		"partitions: one claim is impossible, whatever the other has":                    {hardTogether(3, 6, 1, 5, 1), 100, false},
		"partitions: a root has fewer counters than its devices want":                    {hardTogether(2, 6, 1, 4, 1), 200, false},
		"partitions: the largest come first and decide about the rest":                   {hardMixed(7, 9, 1, 1, 10), 300, true},
		"partitions: no two GPUs have the same left":                                     {hardLeft(), 300, false},
		"partitions on one root, after a choice":                                         {hardChoicesAndRoot(16), 100, false},
		"partitions on one root, which are wanted last":                                  {hardRootLast(), 100, false},
		"partitions on one root, and a share":                                            {hardChoicesAndRoot(12, exactly("share", 1, kind(6))), 100, false},
		"partitions on one root, and admin access":                                       {hardChoicesAndRoot(12, adminAccess(exactly("admin", 1, kind(0)))), 100, false},
		"partitions on one root, and more kinds of others":                               {hardChoicesAndRoot(12, onEach("gpu", kind(0), 2, 3, 4, 5, 6, 7)...), 100, false},
		"partitions on one root":                                                         {hardPartitionsOfRoot(), 100, false},
		"shares: 9 of more than half on 8 devices":                                       {hardShares(8, "51", 9, "10", 9), 100, false},
		"shares: large ones last":                                                        {hardShares(8, "10", 9, "90", 8), 300, false},
		"the hardest last: what is impossible shows only at the last of 8 requests":      {hardLast(), 300, false},
		"a way that is found late: the first half of the devices leads nowhere":          {hardLate(), 1000, true},
		"partitions: what is left of a GPU counts, not how it came to that":              {hardHistory(), 3000, false},
		"a device of an unknown kind, which may only come first, and others before it":   {hardUnknownKind(), 100, true},
		"two claims for halves of 8 roots of which each has enough for one, and a third": {hardClaims(), 500, false},
	} {
		t.Run(name, func(t *testing.T) {
			_, in := tc.world.compile(t)
			in.Node = tc.world.nodes[0]
			devices := in.Inventory.ForNode(in.Node)
			if len(devices.Problems) > 0 {
				t.Fatal(devices.Problems[0])
			}
			s := in.searchOf(&atMost{Context: context.Background(), n: 20 * tc.steps}, devices)
			defer s.Release()
			fits := s.Run()
			t.Logf("%d steps", s.Steps())
			if s.SelectorError != nil {
				t.Fatal(s.SelectorError)
			}
			if s.Steps() > tc.steps || fits != tc.fits {
				t.Errorf("%d steps and fits %v, want at most %d and %v", s.Steps(), fits, tc.steps, tc.fits)
			}
		})
	}
}

// atMost ends a search that looks at it so many times.
type atMost struct {
	context.Context
	n int
}

func (c *atMost) Err() error {
	if c.n--; c.n < 0 {
		return context.DeadlineExceeded
	}
	return nil
}

// numbered makes n devices with integer attributes.
func numbered(n int, attributes map[string]func(i int) int) []resourceapi.Device {
	devices := make([]resourceapi.Device, n)
	for i := range devices {
		devices[i] = resourceapi.Device{Name: fmt.Sprintf("device-%d", i), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{}}
		for name, value := range attributes {
			devices[i].Attributes[resourceapi.QualifiedName(name)] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(value(i)))}
		}
	}
	return devices
}

func kind(list ...int) string {
	return fmt.Sprintf(`device.attributes["a.example.com"].kind in [%s]`, strings.Trim(strings.Join(strings.Fields(fmt.Sprint(list)), ", "), "[]"))
}

// match and distinct add a constraint on some or all requests of the last claim.
func (w *world) match(attribute string, requests ...string) *world {
	devices := &w.claims[len(w.claims)-1].Spec.Devices
	devices.Constraints = append(devices.Constraints, resourceapi.DeviceConstraint{
		MatchAttribute: ptr.To(resourceapi.FullyQualifiedName("a.example.com/" + attribute)), Requests: requests,
	})
	return w
}

func (w *world) distinct(attribute string, requests ...string) *world {
	devices := &w.claims[len(w.claims)-1].Spec.Devices
	devices.Constraints = append(devices.Constraints, resourceapi.DeviceConstraint{
		DistinctAttribute: ptr.To(resourceapi.FullyQualifiedName("a.example.com/" + attribute)), Requests: requests,
	})
	return w
}

// hardUnknownKind has 7 devices and one way: the second claim's devices of different links have to be 4, 5 and 6, because that of an unknown
// kind comes first and the others behind it. So the first claim has to take 5, which the other one gets with admin access, and not 0, 2 and
// 3, which are like it.
func hardUnknownKind() *world {
	w := rig()
	w.classes[0].Spec.Selectors = nil // they fail on attributes of unknown kinds
	devices := numbered(7, map[string]func(int) int{"link": func(i int) int { return []int{1, 2, 1, 1, 0, 1, 2}[i] }})
	devices[4].Attributes["link"] = resourceapi.DeviceAttribute{IntValues: []int64{1}}
	w.node("n1", devices...)
	w.claim("c1", exactly("a", 3)).match("link")
	return w.claim("c2", adminAccess(exactly("any", 1)), adminAccess(exactly("different", 3)), exactly("rest", 2)).distinct("link", "different")
}

func per(n int) func(int) int { return func(i int) int { return i / n } }

func mod(n int) func(int) int { return func(i int) int { return i % n } }

func hardRoots() *world {
	w := rig().node("n1", numbered(128, map[string]func(int) int{"root": per(8)})...).hold("n1/device-3", "n1/device-50", "n1/device-90")
	for i := range 14 {
		w.claim(fmt.Sprintf("c%d", i), exactly("a", 4), exactly("b", 4)).match("root")
	}
	return w
}

func hardValues() *world {
	// On each root kind 0 is on even racks, kind 1 on odd ones.
	return rig().node("n1", numbered(128, map[string]func(int) int{
		"root": per(16), "kind": mod(2), "rack": func(i int) int { return i/16*4 + i%4 },
	})...).claim("c", exactly("a", 2, kind(0)), exactly("b", 2, kind(1)), exactly("c", 3)).match("root", "a", "b").match("rack", "a", "b")
}

func hardTriples() *world {
	return rig().node("n1", numbered(8, map[string]func(int) int{
		"root": mod(2), "rack": func(i int) int { return i / 2 % 2 }, "numa": func(i int) int { return i / 4 % 2 }, "kind": mod(1),
	})...).claim("c", exactly("last", 2, kind(0))).match("root", "last").match("rack", "last").match("numa", "last").afterChoices(16)
}

func hardFlow() *world {
	// Each numa has 8 of kind 0, 8 of kind 1 and 16 of kind 2.
	kinds := []int{0, 1, 2, 2}
	return rig().node("n1", numbered(128, map[string]func(int) int{"numa": per(32), "kind": func(i int) int { return kinds[i%4] }})...).
		claim("c", exactly("a", 6, kind(0, 1)), exactly("b", 6, kind(0, 1)), exactly("c", 5, kind(0, 1)), exactly("d", 8)).match("numa")
}

func hardDistinct() *world {
	// Kinds 0, 1 and 2 are on 5 racks together, and each two on 5 as well.
	return rig().node("n1", numbered(64, map[string]func(int) int{"kind": mod(4), "rack": func(i int) int {
		if i%4 == 3 {
			return 5 + i
		}
		return i / 4 % 5
	}})...).claim("c", exactly("a", 2, kind(0)), exactly("b", 2, kind(1)), exactly("c", 2, kind(2)), exactly("d", 4, kind(3))).distinct("rack")
}

func hardOrder() *world {
	w := jointly(0, 0, false)
	var first []resourceapi.Device
	for i := range 30 {
		d := *w.slices[0].Spec.Devices[0].DeepCopy()
		d.Name = fmt.Sprintf("first-%d", i)
		d.Attributes["kind"] = resourceapi.DeviceAttribute{StringValue: ptr.To("first")}
		d.Attributes["tier"] = resourceapi.DeviceAttribute{StringValue: ptr.To(fmt.Sprintf("t%d", i%3))}
		first = append(first, d)
	}
	for i := range w.slices[0].Spec.Devices {
		w.slices[0].Spec.Devices[i].Attributes["tier"] = resourceapi.DeviceAttribute{StringValue: ptr.To("x")}
	}
	w.slices[0].Spec.Devices = append(first, w.slices[0].Spec.Devices...)
	requests := w.claims[0].Spec.Devices.Requests
	requests[0].Exactly.Count = 10
	tier := exactly("tier", 1, `device.attributes["a.example.com"].tier == "t1"`)
	other := exactly("other", 1, `device.attributes["a.example.com"].tier in ["t1", "t2"]`)
	w.claims[0].Spec.Devices.Requests = append(requests, tier, other)
	w.claims[0].Spec.Devices.Constraints[0].Requests = []string{"first", "second"}
	return w
}

func hardTwins() *world {
	// 9 racks have 2 devices, and 30 have one.
	w := rig().node("n1", numbered(48, map[string]func(int) int{"rack": func(i int) int {
		if i < 18 {
			return i / 2
		}
		return i
	}})...)
	for i := range 10 {
		w.claim(fmt.Sprintf("c%d", i), exactly("a", 2)).match("rack")
	}
	return w
}

func hardChoice(requests int) *world {
	// Of each of 8 kinds there are 4, and each request wants 3 of any one kind.
	w := rig().node("n1", numbered(32, map[string]func(int) int{"kind": mod(8)})...)
	var list []resourceapi.DeviceRequest
	for i := range requests {
		var choice []resourceapi.DeviceRequest
		for k := range 8 {
			choice = append(choice, exactly(fmt.Sprintf("k%d", k), 3, kind(k)))
		}
		list = append(list, firstOf(fmt.Sprintf("r%d", i), choice...))
	}
	return w.claim("c", list...)
}

func hardAdmin() *world {
	w := hardTwins()
	return w.claim("admin", adminAccess(exactly("a", 1)))
}

func hardPartitions(gpus, three, two, one int64) *world {
	w, _ := migWorld(int(gpus))
	return w.claim("c", exactly("a", one, kind(0)), exactly("b", two, kind(2)), exactly("c", three, kind(3)))
}

// hardTogether wants partitions of one root, and others of one GPU.
func hardTogether(gpus int, small, middle, single, large int64) *world {
	w, _ := migWorld(gpus)
	return w.claim("c", exactly("a", small, kind(0, 1)), exactly("b", middle, kind(2, 3))).match("root").
		claim("d", exactly("x", single, kind(0)), exactly("y", large, kind(3, 4))).match("gpu")
}

// hardMixed wants partitions of four sizes.
func hardMixed(gpus int, three, two, seven, one int64) *world {
	w, _ := migWorld(gpus)
	return w.claim("c", exactly("c", three, kind(3)), exactly("b", two, kind(2)), exactly("d", seven, kind(5)), exactly("a", one, kind(0)))
}

// hardLeft has ten GPUs of which nearly each has other slices left: none can stand for another one, and what is asked for is as
// much as all of them have, but cannot be cut from them.
func hardLeft() *world {
	w, _ := migWorld(10)
	for gpu, slices := range [][]int{{0, 1}, {5}, {1}, {1, 2}, {}, {1}, {1, 3, 4}, {2, 3}, {0, 1, 4, 6}, {}} {
		for _, slice := range slices {
			w.hold(fmt.Sprintf("n1/gpu-%d-1g-%d", gpu, slice))
		}
	}
	return w.claim("c", exactly("a", 3, kind(4)), exactly("b", 10, kind(0)), exactly("c", 9, kind(2)), exactly("d", 4, kind(3)))
}

func hardPartitionsOfRoot() *world {
	w, _ := migWorld(8)
	// Two GPUs of a root have no room for a 7g, two 3g and two 2g.
	return w.claim("c", exactly("a", 2, kind(2)), exactly("b", 2, kind(3)), exactly("c", 1, kind(5))).match("root").
		claim("d", exactly("a", 4, kind(0)))
}

func hardShares(n int, first string, firsts int, second string, seconds int) *world {
	devices := numbered(n, nil)
	for i := range devices {
		shareable("memory", "100")(i, &devices[i])
	}
	w := rig().node("n1", devices...)
	var requests []resourceapi.DeviceRequest
	for i := range firsts {
		requests = append(requests, takes(exactly(fmt.Sprintf("a%d", i), 1), "memory", first))
	}
	for i := range seconds {
		requests = append(requests, takes(exactly(fmt.Sprintf("b%d", i), 1), "memory", second))
	}
	return w.claim("c", requests...)
}

func hardLast() *world {
	// Devices of kinds 0 and 1 alternate; each request takes 2 of either, and the last wants 2 of kind 0 with other racks.
	w := rig().node("n1", numbered(32, map[string]func(int) int{"kind": mod(2), "rack": per(8), "numa": per(4)})...)
	var requests []resourceapi.DeviceRequest
	for i := range 7 {
		requests = append(requests, exactly(fmt.Sprintf("r%d", i), 2))
	}
	return w.claim("c", append(requests, exactly("last", 5, kind(0)))...).distinct("rack", "last")
}

func hardLate() *world {
	// Claims of 4 of a root; on the first half of the roots there are only 3 and a rest that fits nothing.
	w := rig().node("n1", numbered(64, map[string]func(int) int{"root": func(i int) int {
		if i < 32 {
			return i / 3
		}
		return 100 + i/4
	}})...)
	for i := range 8 {
		w.claim(fmt.Sprintf("c%d", i), exactly("a", 1), exactly("b", 3)).match("root")
	}
	return w
}

func hardHistory() *world {
	w, _ := migWorld(3)
	size := func(k int) resourceapi.DeviceRequest { return exactly("", 1, kind(k)) }
	var requests []resourceapi.DeviceRequest
	for i := range 7 {
		a, b := size(0), size(1)
		a.Name, b.Name = "small", "large"
		requests = append(requests, firstOf(fmt.Sprintf("r%d", i), b, a))
	}
	return w.claim("c", append(requests, exactly("x", 3, kind(4)), exactly("y", 3, kind(2)))...)
}

func hardClaims() *world {
	w := rig().node("n1", numbered(64, map[string]func(int) int{"root": per(8), "kind": mod(2)})...)
	for i := range 8 {
		w.claim(fmt.Sprintf("c%d", i), exactly("a", 3, kind(0)), exactly("b", 2, kind(1))).match("root")
	}
	return w.claim("last", exactly("a", 2, kind(0))).match("root")
}
