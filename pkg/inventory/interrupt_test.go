// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// looks is a context that ends after so many looks at it. CEL looks at it in goroutines, too.
type looks struct {
	context.Context
	left atomic.Int64
}

func (l *looks) Done() <-chan struct{} {
	done := make(chan struct{})
	if l.left.Add(-1) < 0 {
		close(done)
	}
	return done
}

func (l *looks) Err() error {
	if l.left.Load() < 0 {
		return context.Canceled // as if somebody had ended it
	}
	return nil
}

// TestAnInterruptedEvaluationGoesOn evaluates with so many looks at the context that they suffice for a part of four devices. What was
// not evaluated to the end says nothing; the devices that were done are not evaluated again.
func TestAnInterruptedEvaluationGoesOn(t *testing.T) {
	features := DefaultFeatures()
	features.DerivedAttributes = true
	type evaluation func(context.Context) (match, failed int, err error)
	for name, start := range map[string]func(*View, *NodePool) evaluation{
		"selector": func(view *View, p *NodePool) evaluation {
			m := matcher(t, view, MatcherSpec{Selectors: []string{n + " < 2"}})
			return func(ctx context.Context) (int, int, error) {
				match, err := m.On(ctx, p)
				return match.Match.Count(), match.Errors.Count(), err
			}
		},
		"derived attribute": func(view *View, p *NodePool) evaluation {
			d, err := view.Derivation(context.Background(), "ns", "string(2 / "+n+")")
			if err != nil {
				t.Fatal(err)
			}
			return func(ctx context.Context) (int, int, error) {
				column, err := p.Derived(ctx, d)
				return column.Has().Count(), column.Errors().Count(), err
			}
		},
	} {
		// Each device takes some looks: before it, by CEL, after it.
		for looksEach, wantInterrupted := range map[int64][2]int{1: {1000, 1000}, 8: {1, 4}, 100: {0, 0}} {
			t.Run(fmt.Sprintf("%s, %d looks", name, looksEach), func(t *testing.T) {
				store := NewStore(Options{Features: features})
				store.SetSlice(slice("s", "n1", devices("d0", "d1", "d2", "d3"), numbered(3)))
				view := store.View()
				evaluate := start(view, view.ForNode(node("n1")).Pools[0])
				interrupted := 0
				for interrupted < 1000 {
					ctx := &looks{Context: context.Background()}
					ctx.left.Store(looksEach)
					match, failed, err := evaluate(ctx)
					if err == nil {
						break
					}
					if interrupted++; match+failed != 0 {
						t.Errorf("interrupted %d times: %d devices match, %d fail", interrupted, match, failed)
					}
				}
				if interrupted < wantInterrupted[0] || interrupted > wantInterrupted[1] {
					t.Errorf("interrupted %d times, want %v", interrupted, wantInterrupted)
				}
				if interrupted == 1000 {
					return
				}
				ended, cancel := context.WithCancel(context.Background())
				cancel()
				match, failed, err := evaluate(ended)
				wantMatch, wantFailed := 2, 1 // 0 and 1 are less than 2
				if name != "selector" {
					wantFailed = 2 // one is divided by 0
				}
				if match != wantMatch || failed != wantFailed || err != nil {
					t.Errorf("what is known: %d match, %d fail, %v; want %d and %d", match, failed, err, wantMatch, wantFailed)
				}
			})
		}
	}
}

// TestErrorsOfSelectorsAreBounded fails on each of many devices with a text of its own, which may be long.
func TestErrorsOfSelectorsAreBounded(t *testing.T) {
	const slices, each = 20, 20
	store := newStore()
	for i := range slices {
		store.SetSlice(slice(fmt.Sprint("s", i), fmt.Sprint("n", i), pool(fmt.Sprint("p", i), 1, 1), func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices = nil
			for j := range each {
				s.Spec.Devices = append(s.Spec.Devices, resourceapi.Device{Name: fmt.Sprint("d", j), Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
					"n": {StringValue: ptr.To(fmt.Sprintf("%03d", i*each+j))},
				}})
			}
		}))
	}
	view := store.View()
	long := strings.Repeat("x", 2*maxError)
	m := matcher(t, view, MatcherSpec{Selectors: []string{`{"a": true}[` + n + ` + "` + long + `"]`}})
	kept, others := map[string]bool{}, 0
	for i := range slices {
		p := view.ForNode(node(fmt.Sprint("n", i))).Pools[0]
		if got := judged(m, p).Errors.Count(); got != each {
			t.Errorf("%d devices of slice %d fail, want %d", got, i, each)
		}
		for j := range each {
			_, _, err, _ := m.Error(context.Background(), p, j)
			switch {
			case errors.Is(err, errManyErrors):
				others++
			case err == nil || len(err.Error()) > maxError+10 || kept[err.Error()] || !strings.Contains(err.Error(), fmt.Sprintf("no such key: %03dxxx", i*each+j)):
				t.Errorf("device %d of slice %d: %.100v", j, i, err)
			default:
				kept[err.Error()] = true
			}
		}
	}
	if len(kept) != mostValues || others != slices*each-mostValues {
		t.Errorf("%d errors are kept and %d are not, want %d and %d", len(kept), others, mostValues, slices*each-mostValues)
	}
}
