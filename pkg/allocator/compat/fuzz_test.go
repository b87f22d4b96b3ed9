// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
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
	"pgregory.net/rapid"

	"stowage.dev/stowage/internal/hostile"
	"stowage.dev/stowage/pkg/allocator/internal/checker"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// The fuzz targets feed what API validation would refuse, or what an API server of another version let through.
// Whatever it is, ours neither panics nor hangs, and gives nothing that is invalid. Where the API's rules say what the
// answer is, ours is upstream's, if upstream survives; where they do not, as for steps of -1, ours at least hands out
// no more than there is.

// FuzzDifferential lets the fuzzer, guided by coverage, make the draws of TestDifferential.
func FuzzDifferential(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) {
		w := drawWorld(t)
		ours := w.ours(t)
		for _, node := range w.nodes {
			compare(t, w, node, ours)
		}
	}))
}

func FuzzCEL(f *testing.F) {
	for _, selector := range append(append([]string{}, classSelectors...), requestSelectors...) {
		f.Add(selector)
	}
	f.Add(`device.attributes["a.example.com"].model.matches("(x+x+)+y")`)
	f.Add(`[1,2,3].all(a, [1,2,3].all(b, [1,2,3].all(c, a+b+c > 0)))`)
	f.Add(`device.capacity["a.example.com"].memory.isGreaterThan(quantity("1Gi"))`)
	f.Add(``)
	f.Add(`"x"`)
	if !raceDetector { // with it some take 20 s; make differential looks at these
		for _, text := range hostile.Expressions() {
			f.Add(text)
		}
	}
	f.Fuzz(func(t *testing.T, expression string) {
		w := fuzzWorld(resourceapi.Device{
			Name:       "device",
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"model": {StringValue: ptr.To("x")}},
			Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("8Gi")}},
		})
		w.claims[0].Spec.Devices.Requests[0].Exactly.Selectors = celSelectors(expression)
		w.survives(t)
	})
}

func FuzzQuantities(f *testing.F) {
	f.Add("10", "1", "8", "2", "1", "3", "4")
	f.Add("1", "100m", "1", "100m", "100m", "250m", "500m")
	f.Add("9223372036854775807", "0", "", "1", "0", "9223372036854775807", "1")
	f.Add("1Ei", "1", "", "3", "1", "1Ei", "0")
	f.Add("10", "0", "10", "0", "0", "5", "")
	f.Add("10", "1", "10", "-1", "1", "5", "")
	f.Add("10", "", "", "", "", "-3", "")
	f.Add("1Ei", "", "", "1", "0", "1E", "0")
	f.Add("10", "5", "1", "1n", "7", "1u", "3")
	for _, text := range hostile.Quantities {
		f.Add("1Ei", "0", text, "1", "1", text, "0")
		f.Add(text, "0", "", "", "", text, text)
	}
	f.Fuzz(func(t *testing.T, value, least, most, step, usual, asked, consumed string) {
		quantity := func(text string) *resource.Quantity {
			if amount.CheckText(text) != nil {
				return nil // upstream does not end
			}
			if q, err := resource.ParseQuantity(text); err == nil {
				return &q
			}
			return nil
		}
		all := quantity(value)
		if all == nil {
			return
		}
		for _, policy := range []*resourceapi.CapacityRequestPolicy{
			{Default: quantity(usual), ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: quantity(least), Max: quantity(most), Step: quantity(step)}},
			{Default: quantity(usual), ValidValues: quantities(quantity(least), quantity(step), quantity(most))},
			nil,
		} {
			w := fuzzWorld(resourceapi.Device{
				Name: "device", AllowMultipleAllocations: ptr.To(true),
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: *all, RequestPolicy: policy}},
			})
			if q := quantity(asked); q != nil {
				w.claims[0].Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{
					Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": *q},
				}
			}
			if q := quantity(consumed); q != nil {
				w.held = []resourceapi.AllocationResult{{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
					Request: "r", Driver: driverA, Pool: "pool", Device: "device", ShareID: ptr.To(types.UID("held")),
					ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{"memory": *q},
				}}}}}
			}
			w.survives(t)
		}
	})
}

func quantities(in ...*resource.Quantity) []resource.Quantity {
	var out []resource.Quantity
	for _, q := range in {
		if q != nil {
			out = append(out, *q)
		}
	}
	return out
}

// FuzzCounters makes up to 8 partitions of one GPU from the bytes: what each consumes of two counters, and whether it
// is held.
func FuzzCounters(f *testing.F) {
	f.Add("7", "8", uint8(2), []byte{0x11, 0x22, 0x41, 0x12})
	f.Add("1", "500m", uint8(1), []byte{0x10, 0x01, 0x81})
	f.Add("-1", "9223372036854775807", uint8(3), []byte{0xff, 0x7f, 0x00})
	for _, text := range hostile.Quantities {
		f.Add(text, "8", uint8(2), []byte{0x11, 0x22, 0x41, 0x12})
		f.Add("7", text, uint8(1), []byte{0x10, 0x01, 0x81})
	}
	f.Fuzz(func(t *testing.T, first, second string, count uint8, parts []byte) {
		var counters [2]resource.Quantity
		for i, text := range []string{first, second} {
			if amount.CheckText(text) != nil {
				return
			}
			q, err := resource.ParseQuantity(text)
			if err != nil {
				return
			}
			counters[i] = q
		}
		var devices []resourceapi.Device
		w := fuzzWorld()
		for i, part := range parts[:min(len(parts), 8)] {
			name := fmt.Sprintf("part-%d", i)
			devices = append(devices, resourceapi.Device{Name: name, ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
				CounterSet: "gpu", Counters: map[string]resourceapi.Counter{
					"first":  {Value: *resource.NewQuantity(int64(part&7), resource.DecimalSI)},
					"second": {Value: *resource.NewMilliQuantity(int64(part>>3&15)*500, resource.DecimalSI)},
				},
			}}})
			if part&0x80 != 0 {
				w.held = append(w.held, resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
					Request: "r", Driver: driverA, Pool: "pool", Device: name,
				}}}})
			}
		}
		w.slices[0].Spec.Devices = devices
		w.slices[0].Spec.Pool.ResourceSliceCount = 2
		sets := w.slices[0].DeepCopy()
		sets.Name, sets.Spec.Devices = "sets", nil
		sets.Spec.SharedCounters = []resourceapi.CounterSet{{Name: "gpu", Counters: map[string]resourceapi.Counter{
			"first": {Value: counters[0]}, "second": {Value: counters[1]},
		}}}
		w.slices = append(w.slices, sets)
		w.claims[0].Spec.Devices.Requests[0].Exactly.Count = int64(count % 9)
		w.survives(t)
	})
}

// FuzzSlices takes JSON of any slices and claims.
func FuzzSlices(f *testing.F) {
	add := func(objects []*resourceapi.ResourceSlice, claim *resourceapi.ResourceClaim) {
		a, errA := json.Marshal(objects)
		b, errB := json.Marshal(claim)
		if err := errors.Join(errA, errB); err != nil {
			f.Fatal(err)
		}
		f.Add(a, b)
	}
	for seed := range 20 {
		w := rapid.Custom(drawWorld).Example(seed)
		add(w.slices, w.claims[0])
	}
	for seed := range uint64(20) {
		g := hostile.New(seed, "default", "node")
		g.Classes = []string{"class-0"}
		add(g.Pool(), g.Claim())
	}
	f.Add([]byte(`[{"spec":{"devices":[{}]}}, null]`), []byte(`{"spec":{"devices":{"requests":[{"name":"r"}]}}}`))
	f.Fuzz(func(t *testing.T, objects, claim []byte) {
		w := fuzzWorld()
		w.slices = nil
		var decoded []*resourceapi.ResourceSlice
		if json.Unmarshal(objects, &decoded) != nil || json.Unmarshal(claim, w.claims[0]) != nil {
			return
		}
		for _, slice := range decoded {
			if slice != nil {
				w.slices = append(w.slices, slice)
			}
		}
		w.survives(t)
	})
}

// upstreamsTime is what upstream's allocator has for an answer.
const upstreamsTime = 200 * time.Millisecond

// isBound tells whether ours refuses what may take too long, which upstream does not.
func isBound(err error) bool {
	return err != nil && slices.ContainsFunc([]string{"out of bounds", "is too long for a quantity", "makes values that are too large", "the regular expression takes too long"}, func(text string) bool {
		return strings.Contains(err.Error(), text)
	})
}

// fuzzWorld has one node with one slice, and a claim for one device.
func fuzzWorld(devices ...resourceapi.Device) *world {
	w := &world{nodes: []*v1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "node"}}}}
	w.features.AdminAccess, w.features.PrioritizedList, w.features.DeviceTaints = true, true, true
	w.features.PartitionableDevices, w.features.ConsumableCapacity, w.features.FractionalCapacityRange = true, true, true
	w.features.DeviceBindingAndStatus = true
	slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "slice"}}
	slice.Spec = resourceapi.ResourceSliceSpec{
		Driver: driverA, NodeName: ptr.To("node"), Devices: devices,
		Pool: resourceapi.ResourcePool{Name: "pool", Generation: 1, ResourceSliceCount: 1},
	}
	w.slices = []*resourceapi.ResourceSlice{slice}
	w.classes = []*resourceapi.DeviceClass{{ObjectMeta: metav1.ObjectMeta{Name: "class-0"}}}
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim"}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: "class-0", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: 1,
	}}}
	w.claims = []*resourceapi.ResourceClaim{claim}
	return w
}

// survives runs ours, and upstream's where the API's rules say what the answer is.
func (w *world) survives(t *testing.T) {
	t.Helper()
	upstream, ours := w.upstream(t), w.ours(t)
	node := w.nodes[0]
	// What does not even look at its deadline cannot be stopped, only reported.
	watchdog := time.AfterFunc(time.Minute, func() { panic("ours hangs\n" + w.dump(node)) })
	got, gotErr := within(30*time.Second, ours, node, w.claims)
	watchdog.Stop()
	if errors.Is(gotErr, context.DeadlineExceeded) {
		t.Fatalf("takes too long\n%s", w.dump(node))
	}
	if w.rules() != nil {
		if err := w.overcommits(got); err != nil {
			t.Fatalf("%v\n%s\n%s", err, toYAML(got), w.dump(node))
		}
		return
	}
	if got != nil {
		if err := checker.Check(w.cluster(node), w.claims, got); err != nil {
			t.Fatalf("invalid allocation: %v\n%s\n%s", err, toYAML(got), w.dump(node))
		}
	}
	var want []resourceapi.AllocationResult
	survived := func() (survived bool) {
		defer func() {
			if recover() != nil {
				survived = false
			}
		}()
		var err error
		began := time.Now()
		want, err = within(upstreamsTime, upstream, node, w.claims)
		return err == nil && time.Since(began) < upstreamsTime // an interrupted selector may count as one that does not match
	}()
	if !survived {
		return
	}
	switch {
	case want != nil && got == nil && isBound(gotErr):
	case want != nil && got == nil:
		t.Fatalf("refused (%v), but upstream has an answer:\n%s\n%s", gotErr, toYAML(want), w.dump(node))
	case want != nil:
		if diff := cmp.Diff(want, got, comparable); diff != "" {
			t.Fatalf("allocation differs (-upstream, +ours):\n%s\n%s", diff, w.dump(node))
		}
	case got != nil:
		t.Fatalf("upstream finds nothing, ours does:\n%s\n%s", toYAML(got), w.dump(node))
	}
}
