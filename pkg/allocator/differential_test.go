// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"errors"
	"flag"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"pgregory.net/rapid"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/allocator/internal/checker"
	"stowage.dev/stowage/pkg/allocator/internal/search"
)

var upstreamFeatures = structured.Features{
	AdminAccess: true, ConsumableCapacity: true, DeviceBindingAndStatus: true, DeviceTaints: true,
	FractionalCapacityRange: true, PartitionableDevices: true, PrioritizedList: true,
}

var celCache = cel.NewCache(100, cel.Features{EnableConsumableCapacity: true})

func newUpstream(tb interface{ Fatalf(string, ...any) }, w *world) structured.Allocator {
	allocated := structured.AllocatedState{
		AllocatedDevices:         sets.New[structured.DeviceID](),
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
		AggregatedCapacity:       structured.NewConsumedCapacityCollection(),
	}
	for _, id := range w.held {
		allocated.AllocatedDevices.Insert(structured.MakeDeviceID(id.Driver, id.Pool, id.Device))
	}
	for _, share := range w.shares {
		id := structured.MakeDeviceID(share.Driver, share.Pool, share.Device)
		allocated.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, share.ShareID))
		if share.ConsumedCapacity != nil {
			allocated.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, share.ConsumedCapacity))
		}
	}
	allocator, err := structured.NewAllocator(context.Background(), upstreamFeatures, allocated, classLister(w.classes), w.slices, celCache)
	if err != nil {
		tb.Fatalf("upstream: %v", err)
	}
	return allocator
}

// TestFirstFitIsUpstreams draws clusters and claims and compares with upstream's allocator, node by node: the same
// answer, and where there is one the same allocation to the last byte. Where upstream gives the pod up with an
// error, ours may have an answer, but a valid one.
func TestFirstFitIsUpstreams(t *testing.T) {
	differential(t, drawWorld, search.Variant{})
}

// TestFirstFitIsUpstreamsWhereDevicesAreScarce does the same where the first attempt often has to be given up.
func TestFirstFitIsUpstreamsWhereDevicesAreScarce(t *testing.T) {
	differential(t, drawTightWorld, search.Variant{})
}

// TestFirstFitIsUpstreamsWhereDevicesShare does the same with counters and capacity of which there is little.
func TestFirstFitIsUpstreamsWhereDevicesShare(t *testing.T) {
	differential(t, drawSharingWorld, search.Variant{})
}

// TestFirstFitIsUpstreamsThoroughly does the same with the thorough attempt as soon as the greedy one is stuck, which otherwise
// few of these small worlds need.
func TestFirstFitIsUpstreamsThoroughly(t *testing.T) {
	for name, draw := range map[string]func(*rapid.T) *world{
		"any devices": drawWorld, "scarce devices": drawTightWorld, "admin access": drawAdminWorld, "devices that share": drawSharingWorld,
	} {
		t.Run(name, func(t *testing.T) { differential(t, draw, search.Variant{Hurried: true}) })
	}
}

// differential compares in 100 draws, or in as many as -rapid.checks says: make differential asks for 2,000.
func differential(t *testing.T, draw func(*rapid.T) *world, by search.Variant) {
	var stats differences
	rapid.Check(t, func(t *rapid.T) { stats.compare(t, draw(t), by) })
	t.Logf("%+v", stats)
	draws, err := strconv.Atoi(flag.Lookup("rapid.checks").Value.String())
	if err != nil {
		t.Fatal(err)
	}
	if draws >= 500 && stats.Same < draws/20 {
		t.Errorf("only %d allocations were compared in %d draws", stats.Same, draws)
	}
}

// differences counts nodes by the outcome of the comparison.
type differences struct {
	// Same allocation; refused by both.
	Same, Refused int
	// Where upstream fails with an error: refused, too, or allocated.
	Failed, Recovered int
	// Upstream took too long.
	Slow int
}

func (d *differences) compare(t *rapid.T, w *world, by search.Variant) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	upstream := newUpstream(t, w)
	view, held := w.store().View(), w.usage()
	requests, compileErr := Compile(w.claims, view, DefaultFeatures())
	for _, node := range w.nodes {
		want, wantErr := allocateUpstream(upstream, node, w.claims, 20*time.Millisecond)
		if compileErr != nil {
			if want != nil {
				t.Fatalf("does not compile, but upstream has an answer\nerror: %v\n%s", compileErr, w.dump(node))
			}
			continue
		}
		in := Input{Requests: requests, Node: node, Inventory: view, Usage: held, variant: by}
		got, check := Allocate(ctx, in), Check(ctx, in)
		if got.Fits() != check.Fits() || got.Score != check.Score {
			t.Fatalf("Allocate and Check differ: %v and %v\n%s", got, check, w.dump(node))
		}
		for range 3 { // of a template's second pod on, what is found is kept
			again, err := Compile(w.claims, view, DefaultFeatures())
			if err != nil {
				t.Fatalf("compiled once, but not again: %v", err)
			}
			in.Requests = again
			if known := Check(ctx, in); known.Score != check.Score || known.Fits() != check.Fits() || (!check.Fits() && known.Failure.String() != check.Failure.String()) {
				t.Fatalf("%v for the first pod, %v for a later one of the same template\n%s", check, known, w.dump(node))
			}
		}
		if got.Failure != nil && got.Failure.Reason == explain.ReasonUndecided {
			t.Fatalf("too slow\n%s", w.dump(node))
		}
		if got.Fits() {
			if err := checker.Check(w.cluster(node), w.claims, got.Allocations); err != nil {
				t.Fatalf("invalid allocation: %v\n%s", err, w.dump(node))
			}
		}
		switch {
		case errors.Is(wantErr, context.DeadlineExceeded):
			d.Slow++
		case wantErr != nil && got.Fits():
			d.Recovered++
		case wantErr != nil:
			d.Failed++
		case got.Fits():
			if diff := cmp.Diff(want, got.Allocations, cmpopts.IgnoreFields(resourceapi.DeviceRequestAllocationResult{}, "ShareID")); diff != "" {
				t.Fatalf("allocation differs (-upstream, +ours):\n%s\n%s", diff, w.dump(node))
			}
			d.Same++
		case want != nil:
			t.Fatalf("refused: %v, but upstream has an answer:\n%s\n%s", got.Failure, toYAML(want), w.dump(node))
		default:
			d.Refused++
		}
	}
}

// allocateUpstream limits the time: upstream's search is exponential.
func allocateUpstream(upstream structured.Allocator, node *v1.Node, claims []*resourceapi.ResourceClaim, limit time.Duration) ([]resourceapi.AllocationResult, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return upstream.Allocate(ctx, node, claims)
}

func (w *world) dump(node *v1.Node) string {
	text := "--- node\n" + toYAML(node)
	for _, slice := range w.slices {
		text += "--- slice\n" + toYAML(slice)
	}
	for _, claim := range w.claims {
		text += "--- claim\n" + toYAML(claim)
	}
	for _, id := range w.held {
		text += "held: " + id.String() + "\n"
	}
	for i := range w.shares {
		text += "--- share\n" + toYAML(&w.shares[i])
	}
	return text
}

func toYAML(v any) string {
	data, err := yaml.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(data)
}
