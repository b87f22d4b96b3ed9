// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"k8s.io/dynamic-resource-allocation/cel"

	"stowage.dev/stowage/pkg/inventory/boundedcel"
)

// Derivation is one compiled CEL expression by which a request derives an attribute from a device (KEP-6080), with its
// results on slices. Immutable but for those.
type Derivation struct {
	text    string
	slot    int
	program boundedcel.Compiled
	values  Features
}

// derivedResult has what one derivation makes of the devices of one slice. Immutable.
type derivedResult struct {
	derivation *Derivation
	values     [][]AttributeValue // by device; of all if done
	// errs has the devices on which the expression failed at run time. Nil if none.
	errs map[int]error
	done bool
}

// Derivation returns the compiled expression from the bounded table, in which it is kept for the namespace. The error is a
// [*CompileError], or that ctx ended before.
func (v *View) Derivation(ctx context.Context, namespace, expression string) (*Derivation, error) {
	return v.caches.derivations.get(ctx, namespace, expression, func() (made[*Derivation], error) {
		program, err := v.caches.features.compileCEL(expression, true)
		if err != nil {
			return made[*Derivation]{}, err
		}
		return made[*Derivation]{bytes: program.Bytes, in: func(slot int) *Derivation {
			return &Derivation{text: expression, slot: slot, program: program, values: v.caches.features}
		}}, nil
	})
}

// Expression is what the derivation was compiled from.
func (d *Derivation) Expression() string { return d.text }

// on returns what the derivation makes of the slice's devices, evaluating it if that was not done yet. It is evaluated
// also on devices that no request with it matches: whether it fails on those is never asked. The error is that ctx ended
// before; the devices that were done by then are not evaluated again.
func (d *Derivation) on(ctx context.Context, s *Slice) (*derivedResult, error) {
	r := &derivedResult{derivation: d}
	if kept := s.derived.get(d.slot); kept != nil && kept.derivation == d {
		if kept.done {
			return kept, nil
		}
		r.values, r.errs = slices.Clone(kept.values), maps.Clone(kept.errs)
	}
	interrupted := func(err error) (*derivedResult, error) {
		if len(r.values) > 0 {
			s.derived.put(d.slot, r)
		}
		return nil, err
	}
	for i := len(r.values); i < len(s.Object.Spec.Devices); i++ {
		if err := endOf(ctx); err != nil {
			return interrupted(err)
		}
		attribute, _, err := d.program.EvaluateDerivedAttribute(ctx, d.program.Reads.Of(s.input(i)))
		if err := endOf(ctx); err != nil {
			return interrupted(err) // A result outlives the caller's deadline, so it must not depend on it.
		}
		r.values = append(r.values, nil)
		if err != nil {
			if r.errs == nil {
				r.errs = make(map[int]error)
			}
			r.errs[i] = fmt.Errorf("CEL runtime error: %w", cel.EnhanceRuntimeError(err))
			continue
		}
		r.values[i] = d.values.values(attribute)
	}
	r.done = true
	s.derived.put(d.slot, r)
	return r, nil
}
