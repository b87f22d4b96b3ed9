// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator/explain"
)

// TestADeadlineInTheOrderOfAPolicyLeavesFirstFits ends the time while the devices of the policy are looked for: those of
// FirstFit are found by then.
func TestADeadlineInTheOrderOfAPolicyLeavesFirstFits(t *testing.T) {
	// The later, the smaller.
	const devices, wanted = 40, 20
	var cards []resourceapi.Device
	var first, last []string
	for i := range devices {
		name := fmt.Sprintf("card-%d", i)
		cards = append(cards, memory(name, fmt.Sprintf("%dGi", devices-i)))
		if i < wanted {
			first = append(first, name)
		} else {
			last = append([]string{name}, last...)
		}
	}
	w := rig().node("n1", cards...).claim("c", exactly("card", wanted))
	for name, tc := range map[string]struct {
		policy Policy
		looks  int
		want   []string
	}{
		"enough time":                             {SmallestFit, 100, last},
		"the time ends after the first fit":       {SmallestFit, 2, first},
		"the time is over before the first fit":   {SmallestFit, 1, nil},
		"enough time for the first fit":           {FirstFit, 2, first},
		"the time is over before FirstFit has it": {FirstFit, 1, nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, in := w.compile(t)
			in.Node, in.Policy = w.nodes[0], tc.policy
			result := Allocate(&atMost{Context: context.Background(), n: tc.looks}, in)
			if tc.want == nil {
				if result.Fits() || result.Failure.Reason != explain.ReasonUndecided {
					t.Errorf("fits is %v, %v", result.Fits(), result.Failure)
				}
				return
			}
			if !result.Fits() {
				t.Fatal(result.Failure)
			}
			var got []string
			for _, r := range result.Allocations[0].Devices.Results {
				got = append(got, r.Device)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}

// TestADeadlineInTheThoroughAttemptIsOfItsNode ends the time on one node in the thorough attempt. The other node fits.
func TestADeadlineInTheThoroughAttemptIsOfItsNode(t *testing.T) {
	w := hardChoice(9).node("n2", numbered(64, map[string]func(int) int{"kind": mod(8)})...)
	const looks = 20
	_, in := w.compile(t)
	in.Node = w.nodes[0]

	s := in.searchOf(&atMost{Context: context.Background(), n: looks}, in.Inventory.ForNode(in.Node))
	defer s.Release()
	if s.Run() || !errors.Is(s.Err, context.DeadlineExceeded) || s.Steps() < 100 { // the short attempt has 24
		t.Fatalf("the search ended with %v after %d steps", s.Err, s.Steps())
	}
	for _, decide := range []func(context.Context, Input) Result{Check, Allocate} {
		for i, fits := range []bool{false, true} {
			in.Node = w.nodes[i]
			result := decide(&atMost{Context: context.Background(), n: looks}, in)
			switch {
			case result.Fits() != fits:
				t.Errorf("%s: fits is %v, %v", in.Node.Name, result.Fits(), result.Failure)
			case !fits && (result.Failure.Reason != explain.ReasonUndecided || !errors.Is(result.Failure.Err, context.DeadlineExceeded)):
				t.Errorf("%s: %v", in.Node.Name, result.Failure)
			}
		}
	}
}

// TestTheClockIsLookedAtWhileNoDeviceGoes has many devices of which only the last two go with each other. Each of them is tried for one place, which is one step.
func TestTheClockIsLookedAtWhileNoDeviceGoes(t *testing.T) {
	const devices, looks = 4096, 8
	w := rig().node("n1", numbered(devices, map[string]func(int) int{"kind": func(i int) int { return min(i, devices-2) }})...).claim("c", exactly("pair", 2))
	w.claims[0].Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: ptr.To[resourceapi.FullyQualifiedName](driverA + "/kind")}}
	for name, policy := range map[string]Policy{"FirstFit": FirstFit, "SmallestFit": SmallestFit} {
		t.Run(name, func(t *testing.T) {
			_, in := w.compile(t)
			in.Node, in.Policy = w.nodes[0], policy
			s := in.searchOf(&atMost{Context: context.Background(), n: looks}, in.Inventory.ForNode(in.Node))
			defer s.Release()
			if s.Run() || !errors.Is(s.Err, context.DeadlineExceeded) || s.Steps() > looks {
				t.Errorf("the search ended with %v after %d steps, want no more than %d looks at the clock", s.Err, s.Steps(), looks)
			}
		})
	}
}
