// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/internal/checker"
)

// upstreamErrors are all kinds of errors with which upstream gives up in the draws. TestUpstreamGivesUp has each.
var upstreamErrors = []upstreamError{
	{name: "a feature is disabled", text: regexp.MustCompile(`feature is disabled$`), first: true},
	{name: "too many devices", text: regexp.MustCompile(`exceeds the claim limit of 32`), first: true},
	{name: "all devices beside an incomplete pool", text: regexp.MustCompile(`asks for all devices, but resource pool \S+ is currently being updated$`), first: true},
	{name: "all devices beside an invalid pool", text: regexp.MustCompile(`asks for all devices, but resource pool \S+ is currently invalid$`), first: true},
	{name: "no devices beside an invalid pool", text: regexp.MustCompile(`^invalid resource pools were encountered`)},
	// What a request for all devices gets may contradict what others got first, which can be something else. And there may be
	// another alternative, which the API says is tried where one cannot be satisfied.
	{name: "all devices contradict a constraint", text: regexp.MustCompile(`because a claim constraint would not be satisfied$`), hasty: true},
	// "Any other result is an error and causes allocation of devices to abort", says the API of an expression, which "evaluates a
	// single device", the "device under consideration". Upstream considers also devices for other nodes, and further ones for
	// picks that ours knows to lead nowhere.
	{name: "a selector fails", text: regexp.MustCompile(`^class \S+: selector #0 on device \S+: CEL runtime error`), hasty: true},
	{name: "a derived attribute fails", text: regexp.MustCompile(`^evaluate derived attribute \S+ on device \S+ failed`), hasty: true},
}

// upstreamError is a kind of error with which upstream gives up on a node.
type upstreamError struct {
	name string
	text *regexp.Regexp
	// first tells that it is looked for before any device is chosen.
	first bool
	// hasty tells that upstream may give up although there is an answer. Ours finds that.
	hasty bool
}

func kindOf(err error) *upstreamError {
	if err == nil {
		return nil
	}
	for i := range upstreamErrors {
		if upstreamErrors[i].text.MatchString(err.Error()) {
			return &upstreamErrors[i]
		}
	}
	return nil
}

// explainOutcome says what is behind an error of upstream's. Fatal is an error of another kind than those listed, an answer of ours
// where upstream is not hasty, and an answer that is not upstream's in a patient world.
func explainOutcome(t *rapid.T, w *world, node *v1.Node, wantErr error, got []resourceapi.AllocationResult, gotErr error) (outcome string) {
	kind := kindOf(wantErr)
	outcome = fmt.Sprintf("upstream gives up, ours allocates %v: %s", got != nil, kind.orNone())
	switch {
	case kind == nil || (!kind.hasty && got != nil):
		t.Fatalf("upstream gives up with %q, ours has %v (%v)\n%s", wantErr, toYAML(got), gotErr, w.dump(node))
	case !kind.hasty:
		if gotErr == nil {
			t.Fatalf("upstream gives up with %q, ours says nothing\n%s", wantErr, w.dump(node))
		}
		return outcome
	}
	if gotErr != nil {
		// Ours gives up, too: with a device on which an expression fails, or for what upstream had not come to yet.
		failed := new(allocator.SelectorError)
		if own := kindOf(gotErr); errors.As(gotErr, &failed) || (own != nil && own.first) {
			return outcome
		}
	}
	patient := w.patient(node)
	want, err := within(upstreamLimit/4, patient.upstream(t), node, patient.claims)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return outcome + ", and has no end if it does not"
	case err != nil && (kindOf(err) == nil || kindOf(err).hasty):
		t.Fatalf("upstream gives up with %q, and if it is spared that with %v\n%s", wantErr, err, w.dump(node))
	}
	if diff := cmp.Diff(want, got, comparable); diff != "" {
		t.Fatalf("upstream gives up with %q, and if it is spared that finds something else than ours (-upstream, +ours):\n%s\n%s", wantErr, diff, w.dump(node))
	}
	return outcome
}

func (e *upstreamError) orNone() string {
	if e == nil {
		return "an error of a kind that is not listed"
	}
	return e.name
}

// patient returns a world that is like this one for the node, but says with other words what makes upstream give up:
//
//   - A request for all devices wants as many as there are. Then it is no error if they contradict a constraint.
//   - An expression that fails on a device does not match it.
func (w *world) patient(node *v1.Node) *world {
	p := *w
	p.classes, p.claims = nil, nil
	for _, class := range w.classes {
		class = class.DeepCopy()
		for i := range class.Spec.Selectors {
			if cel := class.Spec.Selectors[i].CEL; cel.Expression == failingSelector {
				cel.Expression = patientSelector
			}
		}
		p.classes = append(p.classes, class)
	}
	for _, original := range w.claims {
		claim := original.DeepCopy()
		spare := func(name string, mode *resourceapi.DeviceAllocationMode, count *int64, selectors *[]resourceapi.DeviceSelector, derived []resourceapi.DeviceDerivedAttribute) {
			if *mode == resourceapi.DeviceAllocationModeAll {
				total, err := checker.All(w.cluster(node), original, name)
				if err != nil { // not known, and ours does not give any
					*selectors = append(*selectors, celSelectors(`false`)...)
				}
				*mode, *count = resourceapi.DeviceAllocationModeExactCount, int64(max(1, total))
			}
			for _, d := range derived {
				if d.Expression == failingDerivation && isConstrained(claim, name, d.Name) {
					*selectors = append(*selectors, celSelectors(hasModel)...)
				}
			}
		}
		for i := range claim.Spec.Devices.Requests {
			request := &claim.Spec.Devices.Requests[i]
			if r := request.Exactly; r != nil {
				spare(request.Name, &r.AllocationMode, &r.Count, &r.Selectors, r.DerivedAttributes)
			}
			for j := range request.FirstAvailable {
				r := &request.FirstAvailable[j]
				spare(request.Name+"/"+r.Name, &r.AllocationMode, &r.Count, &r.Selectors, r.DerivedAttributes)
			}
		}
		p.claims = append(p.claims, claim)
	}
	return &p
}

// isConstrained tells whether a constraint on the attribute applies to the request, or the alternative "request/alternative".
func isConstrained(claim *resourceapi.ResourceClaim, name string, attribute resourceapi.FullyQualifiedName) bool {
	request, _, _ := strings.Cut(name, "/")
	return slices.ContainsFunc(claim.Spec.Devices.Constraints, func(c resourceapi.DeviceConstraint) bool {
		return (ptr.Deref(c.MatchAttribute, "") == attribute || ptr.Deref(c.DistinctAttribute, "") == attribute) &&
			(len(c.Requests) == 0 || slices.Contains(c.Requests, name) || slices.Contains(c.Requests, request))
	})
}

// TestUpstreamGivesUp has a small world for each kind of error of upstream's. Where it is hasty ours has an answer, which is what
// upstream has in the patient world.
func TestUpstreamGivesUp(t *testing.T) {
	numaFromModel := []resourceapi.DeviceDerivedAttribute{{Name: "example.com/numa", Expression: failingDerivation}}
	tested := make(map[string]bool)
	for name, tc := range map[string]struct {
		world *world
		kind  string
		ours  []string
	}{
		"admin access": {
			world: machine("x0").wants(exact("r", "class-0", 1)).but(func(w *world) {
				w.features.AdminAccess = false
				w.claims[0].Spec.Devices.Requests[0].Exactly.AdminAccess = ptr.To(true)
			}),
			kind: "a feature is disabled",
		},
		"all of 33 devices": {
			world: machine(strings.Fields(strings.Repeat("x0 ", 33))...).wants(allOf("r")),
			kind:  "too many devices",
		},
		"20 devices, and all of 20 or 13 devices": {
			world: machine(strings.Fields(strings.Repeat("x0 ", 7)+strings.Repeat("x1 ", 13))...).wants(exact("r", "class-0", 20),
				firstOf("s", allOf("all"), allOf("on-numa-1", `device.attributes["example.com"].numa == 1`))),
			kind: "too many devices",
		},
		"all devices, and a slice is missing": {
			world: machine("x0").wants(allOf("r")).but(func(w *world) { w.slices[0].Spec.Pool.ResourceSliceCount = 2 }),
			kind:  "all devices beside an incomplete pool",
		},
		"all devices, and a name is there twice": {
			world: machine("x0", "x0").wants(allOf("r")).but(func(w *world) { w.slices[0].Spec.Devices[1].Name = "device-0" }),
			kind:  "all devices beside an invalid pool",
		},
		"one device, and a name is there twice": {
			world: machine("x0", "x0").wants(exact("r", "class-0", 1)).but(func(w *world) { w.slices[0].Spec.Devices[1].Name = "device-0" }),
			kind:  "no devices beside an invalid pool",
		},
		"all devices, which are on two numas, or one": {
			world: machine("x0", "x1").wants(firstOf("r", allOf("all"), exact("one", "class-0", 1))).onOneNuma(),
			kind:  "all devices contradict a constraint",
			ours:  []string{"device-0"},
		},
		"one device, and all of a model, which are on another numa than the first device": {
			world: machine("x0", "x1", "y1").wants(exact("one", "class-0", 1), allOf("all", patientSelector)).onOneNuma(),
			kind:  "all devices contradict a constraint",
			ours:  []string{"device-1", "device-2"},
		},
		"a selector fails on a device for another node": {
			world: machine("-0", "y0").wants(exact("r", "failing", 1)).but(func(w *world) {
				slice := &w.slices[0].Spec
				slice.NodeName, slice.PerDeviceNodeSelection = nil, ptr.To(true)
				slice.Devices[0].NodeName, slice.Devices[1].NodeName = ptr.To("another"), ptr.To("node")
			}),
			kind: "a selector fails",
			ours: []string{"device-1"},
		},
		"a selector fails on a device that upstream tries beside one that another request needs": {
			world: machine("y1", "y0", "y0", "-0").wants(exact("two", "failing", 2), exact("one", "class-0", 1, `device.attributes["example.com"].numa == 1`)),
			kind:  "a selector fails",
			ours:  []string{"device-1", "device-2", "device-0"},
		},
		"an attribute cannot be derived from one of two devices, of which three are wanted, or one": {
			world: machine("x0", "-0").wants(firstOf("r", exact("three", "class-0", 3), exact("one", "class-0", 1))).onOneNuma().but(func(w *world) {
				w.features.DerivedAttributes = true
				w.claims[0].Spec.Devices.Requests[0].FirstAvailable[0].DerivedAttributes = numaFromModel
			}),
			kind: "a derived attribute fails",
			ours: []string{"device-0"},
		},
		"an attribute cannot be derived from one of two devices, of which three are wanted, or one, and that matters to no other request": {
			world: machine("x0", "-0").wants(firstOf("r", exact("three", "class-0", 3), exact("one", "class-0", 1)), exact("s", "class-0", 1)).onOneNuma().but(func(w *world) {
				w.features.DerivedAttributes = true
				devices := &w.claims[0].Spec.Devices
				devices.Requests[0].FirstAvailable[0].DerivedAttributes, devices.Requests[1].Exactly.DerivedAttributes = numaFromModel, numaFromModel
				devices.Constraints[0].Requests = []string{"r"}
			}),
			kind: "a derived attribute fails",
			ours: []string{"device-0", "device-1"},
		},
	} {
		tested[tc.kind] = true
		t.Run(name, func(t *testing.T) {
			w, node := tc.world, tc.world.nodes[0]
			_, wantErr := within(upstreamLimit, w.upstream(t), node, w.claims)
			kind := kindOf(wantErr)
			if kind.orNone() != tc.kind || kind.hasty != (tc.ours != nil) {
				t.Fatalf("upstream gives up with %v, %s; want %s", wantErr, kind.orNone(), tc.kind)
			}
			got, err := within(upstreamLimit, w.ours(t), node, w.claims)
			if diff := cmp.Diff(tc.ours, devicesOf(got), cmpopts.EquateEmpty()); diff != "" {
				t.Fatalf("ours (-want +got):\n%s\n%v", diff, err)
			}
			if !kind.hasty {
				if diff := cmp.Diff(wantErr.Error(), fmt.Sprint(err)); diff != "" {
					t.Errorf("what is said (-upstream, +ours):\n%s", diff)
				}
				if onNode := errors.Is(err, structured.ErrFailedAllocationOnNode); onNode != (tc.kind != "a feature is disabled") {
					t.Errorf("about this node only: %v", onNode)
				}
				return
			}
			w = w.patient(node)
			want, err := within(upstreamLimit, w.upstream(t), node, w.claims)
			if diff := cmp.Diff(want, got, comparable); diff != "" {
				t.Errorf("patient (-upstream, +ours):\n%s\n%v", diff, err)
			}
		})
	}
	for i := range upstreamErrors {
		if !tested[upstreamErrors[i].name] {
			t.Errorf("no case for %q", upstreamErrors[i].name)
		}
	}
}

// machine has one node with devices of which the two letters are the model, - for none, and the numa.
func machine(devices ...string) *world {
	w := fuzzWorld()
	for i, letters := range devices {
		device := resourceapi.Device{Name: fmt.Sprintf("device-%d", i), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"example.com/numa": {IntValue: ptr.To(int64(letters[1] - '0'))},
		}}
		if letters[0] != '-' {
			device.Attributes["model"] = resourceapi.DeviceAttribute{StringValue: ptr.To(letters[:1])}
		}
		w.slices[0].Spec.Devices = append(w.slices[0].Spec.Devices, device)
	}
	failing := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "failing"}}
	failing.Spec.Selectors = celSelectors(failingSelector)
	w.classes = append(w.classes, failing)
	return w
}

func (w *world) wants(requests ...resourceapi.DeviceRequest) *world {
	w.claims[0].Spec.Devices.Requests = requests
	return w
}

func (w *world) onOneNuma() *world {
	w.claims[0].Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: ptr.To(resourceapi.FullyQualifiedName("example.com/numa"))}}
	return w
}

func (w *world) but(change func(*world)) *world {
	change(w)
	return w
}

func exact(name, class string, count int64, selectors ...string) resourceapi.DeviceRequest {
	return resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: class, AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count, Selectors: celSelectors(selectors...),
	}}
}

func allOf(name string, selectors ...string) resourceapi.DeviceRequest {
	r := exact(name, "class-0", 0, selectors...)
	r.Exactly.AllocationMode = resourceapi.DeviceAllocationModeAll
	return r
}

func firstOf(name string, alternatives ...resourceapi.DeviceRequest) resourceapi.DeviceRequest {
	r := resourceapi.DeviceRequest{Name: name}
	for _, a := range alternatives {
		r.FirstAvailable = append(r.FirstAvailable, resourceapi.DeviceSubRequest{
			Name: a.Name, DeviceClassName: a.Exactly.DeviceClassName, AllocationMode: a.Exactly.AllocationMode,
			Count: a.Exactly.Count, Selectors: a.Exactly.Selectors,
		})
	}
	return r
}

// devicesOf lists what was given, in order.
func devicesOf(allocations []resourceapi.AllocationResult) (names []string) {
	for _, allocation := range allocations {
		for _, result := range allocation.Devices.Results {
			names = append(names, result.Device)
		}
	}
	return names
}
