// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/structured"
	"pgregory.net/rapid"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/internal/checker"
)

// upstreamLimit is how long upstream's search may take for one node.
const upstreamLimit = 2 * time.Second

func TestMain(m *testing.M) {
	flag.Parse()
	// rapid's own default is 100, which is little where one draw takes less than a millisecond. make differential asks for 20,000.
	if checks := flag.Lookup("rapid.checks"); checks.Value.String() == checks.DefValue {
		if err := flag.Set("rapid.checks", "300"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// TestDifferential draws clusters and claims over all features and compares with upstream's allocator, node by node:
//
//   - Where upstream finds an allocation, ours is the same, to the last field but the random share IDs.
//   - Whatever ours gives is valid, as the independent checker says.
//   - Ours gives something where upstream gives nothing only if upstream gave up: for lack of time, or with an error of
//     a hasty kind (exceptions_test.go). Then ours gives what upstream gives in an equal cluster that spares it the error.
//   - Check and Allocate agree.
//   - In any other policy there is a valid allocation exactly where there is one in FirstFit.
func TestDifferential(t *testing.T) {
	outcomes := make(map[string]int)
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		ours := w.ours(t)
		for _, node := range w.nodes {
			outcomes[compare(t, w, node, ours)]++
		}
	})
	for outcome, n := range outcomes {
		t.Logf("%6d nodes: %s", n, outcome)
	}
}

// compare makes an allocator of upstream's for this node alone, see TestUpstreamDependsOnWhichNodeAsksFirst.
func compare(t *rapid.T, w *world, node *v1.Node, ours *firstFit) (outcome string) {
	want, wantErr := within(upstreamLimit, w.upstream(t), node, w.claims)
	got, gotErr := within(10*time.Second, ours, node, w.claims)
	if errors.Is(gotErr, context.DeadlineExceeded) {
		t.Fatalf("ours takes too long\n%s", w.dump(node))
	}
	if got != nil {
		if err := checker.Check(w.cluster(node), w.claims, got); err != nil {
			t.Fatalf("invalid allocation: %v\n%s\n%s", err, toYAML(got), w.dump(node))
		}
	}
	compareCheck(t, w, node, ours, got, gotErr)
	switch {
	case want != nil:
		if got == nil {
			t.Fatalf("refused (%v), but upstream has an answer:\n%s\n%s", gotErr, toYAML(want), w.dump(node))
		}
		if diff := cmp.Diff(want, got, comparable); diff != "" {
			t.Fatalf("allocation differs (-upstream, +ours):\n%s\n%s", diff, w.dump(node))
		}
		return "the same allocation"
	case errors.Is(wantErr, context.DeadlineExceeded):
		return fmt.Sprintf("upstream takes longer than %v; ours allocates: %v", upstreamLimit, got != nil)
	case wantErr != nil:
		return explainOutcome(t, w, node, wantErr, got, gotErr)
	case got == nil:
		return "refused by both"
	}
	// Upstream searched everything. There is no case in which that misses what is valid; should one be found, rapid
	// keeps the draw, and it is to be explained here.
	t.Fatalf("upstream finds nothing, ours does:\n%s\n%s", toYAML(got), w.dump(node))
	return ""
}

// within allocates with a time limit.
func within(limit time.Duration, a structured.Allocator, node *v1.Node, claims []*resourceapi.ResourceClaim) ([]resourceapi.AllocationResult, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return a.Allocate(ctx, node, claims)
}

// comparable leaves out what is random, and compares quantities by value.
var comparable = cmp.Options{
	cmp.Comparer(func(a, b *types.UID) bool { return (a == nil) == (b == nil) }),
	cmp.Comparer(func(a, b resource.Quantity) bool { return a.Cmp(b) == 0 }),
	cmpopts.EquateEmpty(),
}

// compareCheck makes sure that Filter's question gets the same answer as Reserve's.
func compareCheck(t *rapid.T, w *world, node *v1.Node, ours *firstFit, got []resourceapi.AllocationResult, gotErr error) {
	view := ours.store.View()
	requests, err := allocator.Compile(w.claims, view, allocatorFeatures(w.features))
	if err != nil {
		if got != nil || gotErr == nil {
			t.Fatalf("does not compile (%v), but was not refused\n%s", err, w.dump(node))
		}
		return
	}
	in := allocator.Input{Requests: requests, Node: node, Inventory: view, Usage: ours.usage}
	check := allocator.Check(context.Background(), in)
	if check.Fits() != (got != nil) {
		t.Fatalf("Check says %v (%v), Allocate %v (%v)\n%s", check.Fits(), check.Failure, got != nil, gotErr, w.dump(node))
	}
	in.Policy, in.Scoring = allocator.SmallestFit, allocator.MostAllocated
	smallest := allocator.Allocate(context.Background(), in)
	if check = allocator.Check(context.Background(), in); check.Fits() != smallest.Fits() || check.Score != smallest.Score || check.Size != smallest.Size {
		t.Fatalf("SmallestFit: Check says %v, score %d, size %d, Allocate %v, score %d, size %d\n%s",
			check.Fits(), check.Score, check.Size, smallest.Fits(), smallest.Score, smallest.Size, w.dump(node))
	}
	// Where a selector fails, it depends on the order whether the search comes to that device.
	if failed := gotErr != nil || !smallest.Fits() && smallest.Failure.SelectorError != nil; !failed && smallest.Fits() != (got != nil) {
		t.Fatalf("SmallestFit says %v (%v), FirstFit %v (%v)\n%s", smallest.Fits(), smallest.Failure, got != nil, gotErr, w.dump(node))
	}
	if smallest.Fits() {
		if err := checker.Check(w.cluster(node), w.claims, smallest.Allocations); err != nil {
			t.Fatalf("SmallestFit: invalid allocation: %v\n%s\n%s", err, toYAML(smallest.Allocations), w.dump(node))
		}
	}
	if check.Failure != nil {
		_ = check.Failure.String()
		text := allocator.Explain(requests, func(yield func(string, *allocator.Failure) bool) { yield(node.Name, check.Failure) }, allocator.Naming{})
		if strings.TrimSpace(text.String()) == "" {
			t.Fatalf("no explanation for %v\n%s", check.Failure, w.dump(node))
		}
	}
}

// TestTheCheckerAcceptsWhatUpstreamAllocates keeps the checker from being stricter than the API: upstream's
// allocations are valid.
func TestTheCheckerAcceptsWhatUpstreamAllocates(t *testing.T) {
	allocated, nodes := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		for _, node := range w.nodes {
			got, _ := within(upstreamLimit, w.upstream(t), node, w.claims)
			nodes++
			if got == nil {
				continue
			}
			allocated++
			if err := checker.Check(w.cluster(node), w.claims, got); err != nil {
				t.Fatalf("not valid: %v\n%s\n%s", err, toYAML(got), w.dump(node))
			}
		}
	})
	t.Logf("%d nodes, of which %d can be used", nodes, allocated)
}
