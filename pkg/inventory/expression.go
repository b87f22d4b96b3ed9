package inventory

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"k8s.io/dynamic-resource-allocation/cel"

	"stowage.dev/stowage/pkg/inventory/bitset"
)

// expression is one compiled CEL selector with its results on slices.
type expression struct {
	text    string
	slot    int
	program cel.CompilationResult
	// id is a number below 1<<idBits that no other expression of the process has; 0 if none is left.
	id uint32
	// results are those on slices of equal nodes.
	results variety[exprResult]
}

// expressionIDs numbers the expressions of the process, from 1.
var expressionIDs atomic.Uint64

// idBits leave as many in a note as the number of a result needs.
const idBits = 24

// exprResult is what one expression says about the devices of one slice. Immutable.
type exprResult struct {
	expr  *expression
	match bitset.Set
	// errs has the devices on which the expression failed at run time; they do not match. Nil if none.
	errs map[int]error
}

func (r *exprResult) equal(o *exprResult) bool {
	return slices.Equal(r.match, o.match) &&
		maps.EqualFunc(r.errs, o.errs, func(a, b error) bool { return a.Error() == b.Error() })
}

// CompileError is a CEL selector that does not compile.
type CompileError struct {
	Expression string
	Err        error
}

func (e *CompileError) Error() string { return fmt.Sprintf("CEL compile error: %v", e.Err) }
func (e *CompileError) Unwrap() error { return e.Err }

// compile returns the expression for text from the bounded table.
func (c *caches) compile(text string) (*expression, error) {
	return c.expressions.get(text, func(slot int) (*expression, error) {
		// The cost was limited when the selector was admitted; the runtime limit still holds.
		program := c.features.compiler().CompileCELExpression(text, cel.Options{DisableCostEstimation: true})
		if program.Error != nil {
			return nil, &CompileError{Expression: text, Err: program.Error}
		}
		e := &expression{text: text, slot: slot, program: program}
		if id := expressionIDs.Add(1); id < 1<<idBits {
			e.id = uint32(id)
		}
		return e, nil
	})
}

// compiler is upstream's, which keeps one for the features used last.
func (f Features) compiler() interface {
	CompileCELExpression(string, cel.Options) cel.CompilationResult
} {
	return cel.GetCompiler(cel.Features{
		EnableConsumableCapacity: f.ConsumableCapacity,
		EnableListTypeAttributes: f.ListTypeAttributes,
	})
}

// on returns what the expression says about the slice's devices, evaluating it if that was not done yet.
func (e *expression) on(s *Slice) *exprResult {
	if r := e.keptOn(s); r != nil {
		return r
	}
	r, number := e.results.share(e.evaluate(s), (*exprResult).equal)
	if number > 0 && e.id > 0 {
		s.notes.put(e.slot, e.id|number<<idBits)
	} else {
		s.results.put(e.slot, r)
	}
	return r
}

// keptOn returns the result that is kept on the slice, nil if there is none.
func (e *expression) keptOn(s *Slice) *exprResult {
	if note := s.notes.get(e.slot); e.id > 0 && note&(1<<idBits-1) == e.id {
		return e.results.value(note >> idBits)
	}
	if r := s.results.get(e.slot); r != nil && r.expr == e {
		return r
	}
	return nil
}

func (e *expression) evaluate(s *Slice) *exprResult {
	devices := s.Object.Spec.Devices
	r := &exprResult{expr: e, match: bitset.New(len(devices))}
	for i := range devices {
		// A result outlives the caller's deadline, so it must not depend on it: CEL's cost limit bounds the
		// time of one evaluation.
		matches, _, err := e.program.DeviceMatches(context.Background(), s.input(i))
		switch {
		case err != nil:
			if r.errs == nil {
				r.errs = make(map[int]error)
			}
			r.errs[i] = cel.EnhanceRuntimeError(err)
		case matches:
			r.match.Add(i)
		}
	}
	return r
}

// input is device i as CEL expressions see it.
func (s *Slice) input(i int) cel.Device {
	device := &s.Object.Spec.Devices[i]
	return cel.Device{
		Driver:                   s.Object.Spec.Driver,
		AllowMultipleAllocations: device.AllowMultipleAllocations,
		Attributes:               device.Attributes,
		Capacity:                 device.Capacity,
	}
}
