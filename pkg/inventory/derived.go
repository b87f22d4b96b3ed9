package inventory

import (
	"context"
	"fmt"

	"k8s.io/dynamic-resource-allocation/cel"
)

// Derivation is one compiled CEL expression by which a request derives an attribute from a device (KEP-6080), with its
// results on slices. Immutable but for those.
type Derivation struct {
	text    string
	slot    int
	program cel.CompilationResult
	values  Features
}

// derivedResult has what one derivation makes of the devices of one slice. Immutable.
type derivedResult struct {
	derivation *Derivation
	values     [][]AttributeValue // by device
	// errs has the devices on which the expression failed at run time. Nil if none.
	errs map[int]error
}

// Derivation returns the compiled expression from the bounded table. The error is a [*CompileError].
func (v *View) Derivation(expression string) (*Derivation, error) {
	return v.caches.derivations.get(expression, func(slot int) (*Derivation, error) {
		program := v.caches.features.compiler().CompileCELExpression(expression, cel.Options{DisableCostEstimation: true, DerivedAttribute: true})
		if program.Error != nil {
			return nil, &CompileError{Expression: expression, Err: program.Error}
		}
		return &Derivation{text: expression, slot: slot, program: program, values: v.caches.features}, nil
	})
}

// Expression is what the derivation was compiled from.
func (d *Derivation) Expression() string { return d.text }

// on returns what the derivation makes of the slice's devices, evaluating it if that was not done yet. It is evaluated
// also on devices that no request with it matches: whether it fails on those is never asked.
func (d *Derivation) on(s *Slice) *derivedResult {
	if r := s.derived.get(d.slot); r != nil && r.derivation == d {
		return r
	}
	devices := s.Object.Spec.Devices
	r := &derivedResult{derivation: d, values: make([][]AttributeValue, len(devices))}
	for i := range devices {
		// As for selectors, the result must not depend on the caller's deadline.
		attribute, _, err := d.program.EvaluateDerivedAttribute(context.Background(), s.input(i))
		if err != nil {
			if r.errs == nil {
				r.errs = make(map[int]error)
			}
			r.errs[i] = fmt.Errorf("CEL runtime error: %w", cel.EnhanceRuntimeError(err))
			continue
		}
		r.values[i] = d.values.values(attribute)
	}
	s.derived.put(d.slot, r)
	return r
}
