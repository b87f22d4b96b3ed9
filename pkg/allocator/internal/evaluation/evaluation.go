// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package evaluation says what the CEL expressions of requests say about devices, as long as there is time for that.
package evaluation

import (
	"context"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/inventory"
)

// Attempt is one attempt to schedule a pod, with the time that it has. What its time does not suffice for on one node it
// is not spent on again on nodes that are alike. It must be comparable, and safe for concurrent use.
type Attempt interface {
	// Begin is called once for each search that does not end at once. It returns when that has to end, in a unit of its own.
	Begin() (end int64)
	// End is called when such a search has ended.
	End()
	// IsOver tells whether that moment has come.
	IsOver(end int64) bool
	// Evaluate is called around each evaluation of CEL expressions whose results are not kept from before. It returns a context that ends
	// when there is no time left for that, and what is to be called after it.
	Evaluate(ctx context.Context) (context.Context, context.CancelFunc)
}

// Evaluator evaluates the CEL expressions of requests on devices, as long as there is time.
type Evaluator struct {
	Ctx     context.Context
	Attempt Attempt // nil for no bound besides Ctx
	// Interrupted is why CEL could not say everything that was asked before its time was over: nothing that was found since is true.
	Interrupted error
}

// Match returns what the alternative says about the devices of a pool. If there is no time to evaluate its selectors no device
// matches, and the evaluator is interrupted.
func (e *Evaluator) Match(a *compiled.Alternative, p *inventory.NodePool) *inventory.PoolMatch {
	if known := a.Matcher.Known(p); known != nil {
		return known
	}
	var match *inventory.PoolMatch
	e.evaluate(func(ctx context.Context) (err error) {
		match, err = a.Matcher.On(ctx, p)
		return err
	})
	return match
}

// Rejections counts the devices of a pool that the selectors reject, see [inventory.Matcher.Rejections].
func (e *Evaluator) Rejections(a *compiled.Alternative, p *inventory.NodePool) (byClass int, by []int) {
	e.evaluate(func(ctx context.Context) (err error) {
		byClass, by, err = a.Matcher.Rejections(ctx, p)
		return err
	})
	return byClass, by
}

// Derive returns what is derived from the devices of a pool.
func (e *Evaluator) Derive(from *inventory.Derivation, p *inventory.NodePool) (column *inventory.Column) {
	e.evaluate(func(ctx context.Context) (err error) {
		column, err = p.Derived(ctx, from)
		return err
	})
	return column
}

// evaluate calls what evaluates CEL, with the time that is left for that.
func (e *Evaluator) evaluate(fn func(context.Context) error) {
	ctx := e.Ctx
	if e.Attempt != nil {
		var done context.CancelFunc
		ctx, done = e.Attempt.Evaluate(ctx)
		defer done()
	}
	if err := fn(ctx); err != nil && e.Interrupted == nil {
		e.Interrupted = err
	}
}
