// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/inventory"
)

// evaluations is an attempt with time for so many evaluations.
type evaluations struct{ left int }

func (*evaluations) Begin() int64      { return 0 }
func (*evaluations) IsOver(int64) bool { return false }
func (*evaluations) End()              {}

func (e *evaluations) Evaluate(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	if e.left--; e.left < 0 {
		cancel(context.DeadlineExceeded)
	}
	return ctx, func() { cancel(nil) }
}

// TestSelectorsAreEvaluatedOnlyWhileThereIsTime ends the time for CEL on one node. It is undecided then, whatever kind of claim it is,
// and nothing of that is kept: with more time it is decided, and after that without any.
func TestSelectorsAreEvaluatedOnlyWhileThereIsTime(t *testing.T) {
	selector := func(i int) string { return fmt.Sprintf(`device.attributes["a.example.com"].index != %d`, 100+i) }
	never := `device.attributes["a.example.com"].index < 0`
	tests := map[string]struct {
		requests []resourceapi.DeviceRequest
		want     explain.Reason // empty if it fits
	}{
		"one request":           {requests: []resourceapi.DeviceRequest{exactly("r", 2, selector(1), selector(2))}},
		"one that nothing has":  {requests: []resourceapi.DeviceRequest{exactly("r", 2, selector(1), never)}, want: explain.ReasonNoMatch},
		"several":               {requests: []resourceapi.DeviceRequest{exactly("a", 1, selector(1)), exactly("b", 1, selector(2))}},
		"several, one hopeless": {requests: []resourceapi.DeviceRequest{exactly("a", 1, selector(1)), exactly("b", 1, never)}, want: explain.ReasonNoMatch},
		"one that fails":        {requests: []resourceapi.DeviceRequest{exactly("r", 1, `device.attributes["a.example.com"].missing == 1`)}, want: explain.ReasonSelectorError},
		"alternatives":          {requests: []resourceapi.DeviceRequest{firstOf("r", exactly("a", 1, never), exactly("b", 1, selector(1)))}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w := rig().node("n1", numbered(8, map[string]func(int) int{"index": func(i int) int { return i }})...).
				node("n2", numbered(8, map[string]func(int) int{"index": func(i int) int { return i }})...).
				claim("c", test.requests...)
			_, in := w.compile(t)
			for _, node := range w.nodes {
				in.Node = node
				for _, decide := range []func(context.Context, Input) Result{Check, Allocate} {
					for _, kept := range []bool{false, false} {
						in.Attempt = &evaluations{}
						result := decide(context.Background(), in)
						if result.Fits() || result.Failure.Reason != explain.ReasonUndecided || !errors.Is(result.Failure.Err, context.DeadlineExceeded) {
							t.Fatalf("without time: fits is %t, %v, again: %t", result.Fits(), result.Failure, kept)
						}
					}
				}
				for _, left := range []int{100, 0} {
					for _, decide := range []func(context.Context, Input) Result{Check, Allocate} {
						in.Attempt = &evaluations{left: left}
						result := decide(context.Background(), in)
						if test.want == "" != result.Fits() || test.want != "" && result.Failure.Reason != test.want {
							t.Errorf("with time for %d evaluations: fits is %t, %v", left, result.Fits(), result.Failure)
						}
					}
				}
			}
		})
	}
}

// TestWhatIsSaidOfConstraintsNeedsTime has an alternative with too few devices, whose attribute nobody derives but who says how many devices can be
// had together. If there is no time for that the node is undecided.
func TestWhatIsSaidOfConstraintsNeedsTime(t *testing.T) {
	many := exactly("many", 3)
	many.Exactly.DerivedAttributes = []resourceapi.DeviceDerivedAttribute{{Name: "example.com/derived", Expression: `device.attributes["a.example.com"].index`}}
	w := rig().node("n1", numbered(2, map[string]func(int) int{"index": mod(1)})...).claim("c", firstOf("r", many, exactly("one", 1))).matchAttribute("example.com/derived")
	w.features = func(f *inventory.Features) { f.DerivedAttributes = true }
	for name, decide := range map[string]func(context.Context, Input) Result{"Check": Check, "Allocate": Allocate} {
		t.Run(name, func(t *testing.T) {
			undecided := 0
			for left := 0; ; left++ {
				_, in := w.compile(t)
				in.Node, in.Attempt = w.nodes[0], &evaluations{left: left}
				failure := decide(context.Background(), in).Failure
				if failure != nil && failure.Reason == explain.ReasonUndecided && left < 10 {
					undecided++
					continue
				}
				want := []ConstraintCounts{{Attribute: "example.com/derived", Best: 2, Wanted: 1}}
				if failure == nil || failure.Reason != explain.ReasonConstraints || !slices.Equal(failure.Constraints, want) {
					t.Fatalf("with time for %d evaluations: %+v, want the constraints %v", left, failure, want)
				}
				break
			}
			if undecided == 0 {
				t.Error("no time was needed")
			}
		})
	}
}

// TestClaimsAreCompiledOnlyWhileThereIsTime compiles two claims of two selectors each. What is compiled already needs no time.
func TestClaimsAreCompiledOnlyWhileThereIsTime(t *testing.T) {
	w := rig().node("n1", numbered(2, nil)...)
	for _, name := range []string{"c1", "c2"} {
		w.claim(name, exactly("r", 1, `device.driver != "`+name+`"`, `device.driver != "x"`))
	}
	view := w.store().View()
	over := errors.New("no time left")
	ended, cancel := context.WithCancelCause(context.Background())
	cancel(over)
	compile := func(ctx context.Context, n int, want error) {
		t.Helper()
		if requests, err := CompileWithin(ctx, w.claims[:n], view, DefaultFeatures()); !errors.Is(err, want) || (requests == nil) != (want != nil) {
			t.Errorf("%d claims: %v, want %v", n, err, want)
		}
	}
	compile(ended, 1, over)
	compile(context.Background(), 1, nil)
	compile(ended, 1, nil)
	compile(ended, 2, over)
	compile(context.Background(), 2, nil)
	compile(ended, 2, nil)
}
