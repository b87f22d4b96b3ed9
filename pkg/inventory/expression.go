// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"k8s.io/dynamic-resource-allocation/cel"

	"stowage.dev/stowage/pkg/inventory/bitset"
	"stowage.dev/stowage/pkg/inventory/boundedcel"
)

// expression is one compiled CEL selector with its results on slices.
type expression struct {
	text    string
	slot    int
	program boundedcel.Compiled
	// id is a number below 1<<idBits that no other expression of the process has; 0 if none is left.
	id uint32
	// results are those on slices of equal nodes.
	results variety[exprResult]
	// errors are the different errors at run time, each once.
	errors variety[error]
}

// expressionIDs numbers the expressions of the process, from 1.
var expressionIDs atomic.Uint64

// idBits leave as many in a note as the number of a result needs.
const idBits = 24

// exprResult is what one expression says about the first devices of one slice. Immutable.
type exprResult struct {
	expr  *expression
	match bitset.Set
	// failed are the devices on which the expression failed at run time; they do not match. Nil if none.
	failed bitset.Set
	// errors are their errors, by device: numbers in expr.errors, 0 for one that is not kept. Nil if none failed.
	errors []uint8
	// devices is how many have been evaluated: fewer than the slice has if there was no time for all.
	devices int
}

func (r *exprResult) equal(o *exprResult) bool {
	return slices.Equal(r.match, o.match) && slices.Equal(r.failed, o.failed) && slices.Equal(r.errors, o.errors)
}

// maxError bounds the text of an error that is kept, in bytes.
const maxError = 512

// errManyErrors stands for an error that is not kept.
var errManyErrors = errors.New("failed in one of more different ways than are kept")

// why is the error on a device that failed.
func (e *expression) why(r *exprResult, device int) error {
	if number := r.errors[device]; number > 0 {
		return *e.errors.value(uint32(number))
	}
	return errManyErrors
}

// CompileError is a CEL selector that does not compile.
type CompileError struct {
	Expression string
	Err        error
}

func (e *CompileError) Error() string { return fmt.Sprintf("CEL compile error: %v", e.Err) }
func (e *CompileError) Unwrap() error { return e.Err }

// compileCEL compiles an expression, of a derived attribute or of a selector. The error is a [*CompileError].
func (f Features) compileCEL(text string, derived bool) (boundedcel.Compiled, error) {
	features := cel.Features{EnableConsumableCapacity: f.ConsumableCapacity, EnableListTypeAttributes: f.ListTypeAttributes}
	compiled, err := boundedcel.Compile(features, text, derived)
	if err != nil {
		return compiled, &CompileError{Expression: text, Err: err}
	}
	return compiled, nil
}

// compile returns the expression for text from the bounded table.
func (c *caches) compile(ctx context.Context, owner, text string) (*expression, error) {
	return c.expressions.get(ctx, owner, text, func() (made[*expression], error) {
		program, err := c.features.compileCEL(text, false)
		if err != nil {
			return made[*expression]{}, err
		}
		e := &expression{text: text, program: program}
		if id := expressionIDs.Add(1); id < 1<<idBits {
			e.id = uint32(id)
		}
		return made[*expression]{bytes: program.Bytes, in: func(slot int) *expression {
			e.slot = slot
			return e
		}}, nil
	})
}

// on returns what the expression says about the slice's devices, evaluating it on those on which that was not done yet. The error is that
// ctx ended before; what was found until then is kept for the next time.
func (e *expression) on(ctx context.Context, s *Slice) (*exprResult, error) {
	if r := e.keptOn(s); r != nil {
		return r, nil
	}
	evaluated, err := e.evaluate(ctx, s)
	if err != nil {
		if evaluated.devices > 0 {
			s.results.put(e.slot, evaluated)
		}
		return nil, err
	}
	r, number := e.results.share(evaluated, (*exprResult).equal)
	if number > 0 && e.id > 0 {
		s.notes.put(e.slot, e.id|number<<idBits)
		s.results.drop(e.slot)
	} else {
		s.results.put(e.slot, r)
	}
	return r, nil
}

// keptOn returns the result for all devices that is kept on the slice, nil if there is none.
func (e *expression) keptOn(s *Slice) *exprResult {
	if note := s.notes.get(e.slot); e.id > 0 && note&(1<<idBits-1) == e.id {
		return e.results.value(note >> idBits)
	}
	if r := s.results.get(e.slot); r != nil && r.expr == e && r.devices == len(s.Object.Spec.Devices) {
		return r
	}
	return nil
}

// endOf is why ctx has ended, nil if it has not.
func endOf(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	default:
		return nil
	}
}

// evaluate goes on where an earlier evaluation was interrupted. With an error the result is of the devices before that.
func (e *expression) evaluate(ctx context.Context, s *Slice) (*exprResult, error) {
	n := len(s.Object.Spec.Devices)
	r := &exprResult{expr: e, match: bitset.New(n)}
	if kept := s.results.get(e.slot); kept != nil && kept.expr == e {
		r.match, r.failed, r.errors, r.devices = kept.match.Clone(), kept.failed.Clone(), slices.Clone(kept.errors), kept.devices
	}
	var (
		last    cel.Device // none has no driver
		matches bool
		err     error
	)
	for ; r.devices < n; r.devices++ {
		if err := endOf(ctx); err != nil {
			return r, err
		}
		// Most devices of a slice are the same to an expression, and then they get one answer.
		if device := s.input(r.devices); last.Driver == "" || !e.program.Reads.Same(last, device) {
			matches, _, err = e.program.DeviceMatches(ctx, e.program.Reads.Of(device))
			last = device
		}
		if err := endOf(ctx); err != nil {
			return r, err // A result outlives the caller's deadline, so it must not depend on it.
		}
		switch {
		case err != nil:
			r.failed = addDevice(r.failed, r.devices, n)
			if r.errors == nil {
				r.errors = make([]uint8, n)
			}
			r.errors[r.devices] = e.numberOf(err)
		case matches:
			r.match.Add(r.devices)
		}
	}
	return r, nil
}

// numberOf keeps an error at run time, which may name what the device has, if it is not among too many.
func (e *expression) numberOf(err error) uint8 {
	text := cel.EnhanceRuntimeError(err).Error()
	if len(text) > maxError {
		text = strings.ToValidUTF8(text[:maxError], "") + " ..."
	}
	kept := errors.New(text)
	_, number := e.errors.share(&kept, func(a, b *error) bool { return (*a).Error() == (*b).Error() })
	return uint8(number)
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
