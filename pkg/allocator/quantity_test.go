// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"errors"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// TestARequestForACapacityOutOfBoundsIsRefusedByName asks for quantities on which arithmetic does not end; with thousandths of a
// device it even panics.
func TestARequestForACapacityOutOfBoundsIsRefusedByName(t *testing.T) {
	const neverEnding = "1e2147483647"
	second := takes(exactly("card", 1), "memory", neverEnding)
	second.Name = "second"
	tests := map[string]struct {
		requests []resourceapi.DeviceRequest
		want     ClaimError
	}{
		"the request's": {
			requests: []resourceapi.DeviceRequest{exactly("card", 1), second},
			want:     ClaimError{Request: "second", Field: "devices.requests[1].exactly.capacity.requests[memory]"},
		},
		"an alternative's": {
			requests: []resourceapi.DeviceRequest{firstOf("first", exactly("card", 1), second)},
			want:     ClaimError{Request: "first/second", Field: "devices.requests[0].firstAvailable[1].capacity.requests[memory]"},
		},
		"of another capacity, which the device does not have": {
			requests: []resourceapi.DeviceRequest{takes(exactly("card", 1), "other", "1e20000000")},
			want:     ClaimError{Request: exactly("card", 1).Name, Field: "devices.requests[0].exactly.capacity.requests[other]"},
		},
		"zero with an exponent": {
			requests: []resourceapi.DeviceRequest{takes(exactly("card", 1), "memory", "0e2147483647")},
			want:     ClaimError{Request: exactly("card", 1).Name, Field: "devices.requests[0].exactly.capacity.requests[memory]"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w := rig().node("n1", memory("card-0", "1500m"), memory("card-1", "40Gi")).claim("c", test.requests...)
			_, err := Compile(w.claims, w.store().View(), DefaultFeatures())
			var got *ClaimError
			if !errors.As(err, &got) {
				t.Fatalf("the error is %v", err)
			}
			if got.Claim != "c" || got.Request != test.want.Request || got.Field != test.want.Field ||
				!strings.Contains(got.Reason, "out of bounds") || len(got.Reason) > 200 {
				t.Errorf("the error is %v", err)
			}
		})
	}
}

// TestWhatOthersHoldOutOfBoundsIsAllOfADevice has a claim, of another scheduler or driver, whose share takes a quantity that
// nothing can calculate with.
func TestWhatOthersHoldOutOfBoundsIsAllOfADevice(t *testing.T) {
	w := rig().node("n1", memory("card-0", "40Gi"), memory("card-1", "40Gi"))
	for _, slice := range w.slices {
		for i := range slice.Spec.Devices {
			slice.Spec.Devices[i].AllowMultipleAllocations = ptr.To(true)
		}
	}
	w.share("n1/card-0", "memory", "1e2147483647").claim("c", takes(exactly("card", 1), "memory", "1Gi"))
	_, in := w.compile(t)
	in.Node = w.nodes[0]
	result := Allocate(context.Background(), in)
	if !result.Fits() {
		t.Fatal(result.Failure)
	}
	got := result.Allocations[0].Devices.Results[0]
	if want := resource.MustParse("1Gi"); got.Device != "card-1" || !amount.Equal(got.ConsumedCapacity["memory"], want) {
		t.Errorf("the claim gets %v of %s", got.ConsumedCapacity, got.Device)
	}
}
