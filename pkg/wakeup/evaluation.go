// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"context"
	"math"

	"stowage.dev/stowage/pkg/allocator"
)

// evaluation bounds the time that CEL expressions take for one pod: it is the pod's time in the pass. Who has none left is woken, and
// evaluates them in an attempt of its own. Searches look at the context instead.
type evaluation struct{ budget *budget }

// namespaceBudgets is how many pods' time those of one namespace have in a pass, those without an answer one. So no namespace
// keeps the pods of others from being woken.
const namespaceBudgets = 4

var _ allocator.Attempt = &evaluation{}

// Begin implements [allocator.Attempt].
func (*evaluation) Begin() (end int64) { return math.MaxInt64 }

// IsOver implements [allocator.Attempt].
func (*evaluation) IsOver(int64) bool { return false }

// End implements [allocator.Attempt].
func (*evaluation) End() {}

// Evaluate implements [allocator.Attempt].
func (e *evaluation) Evaluate(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, e.budget.until.Sub(e.budget.now()))
}
