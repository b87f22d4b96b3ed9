// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package boundedcel compiles CEL expressions on devices so that what they take of time and memory is bounded where upstream's is not.
package boundedcel

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	celgo "github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	apiservercel "k8s.io/apiserver/pkg/cel"
	"k8s.io/dynamic-resource-allocation/cel"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// Compile compiles an expression as upstream does, but for quantity() and isQuantity(): theirs read any exponent, and no
// limit of CEL's bounds what is done with the result. Ours look at the text first, whether the expression has it from a
// literal, an attribute, or puts it together, and take what is out of bounds for no quantity. Those of devices are within
// the bounds: pools with others are invalid. Sums and differences of quantities stay near the bounds.
//
// Regular expressions are bounded as well (regex.go), and what calls them is asked in each step of a loop whether its time is over. An
// expression that makes values too large is refused before (complexity.go).
//
// The cost was limited when the expression was admitted; the limit at run time still holds.
func Compile(features cel.Features, text string, derived bool) (compiled Compiled, err error) {
	compiler := cel.GetCompiler(features) // upstream keeps one for the features used last
	compiled.Bytes = baseBytes + bytesPerByte*int64(len(text))
	// The environment is that of any expression. A text that cannot be parsed is compiled all the same: upstream's error says why.
	parsed, issues := compiler.CompileCELExpression("true", cel.Options{DisableCostEstimation: true}).Environment.Parse(text)
	if issues.Err() == nil {
		instructions, err := checkComplexity(parsed.NativeRep().Expr())
		if err != nil {
			return compiled, err
		}
		compiled.Bytes += bytesPerInstruction * int64(instructions)
		compiled.Reads = readsOf(parsed.NativeRep().Expr())
	}
	compiled.CompilationResult = compiler.CompileCELExpression(text, cel.Options{DisableCostEstimation: true, DerivedAttribute: derived})
	if compiled.Error != nil {
		return compiled, compiled.Error
	}
	calls := func(function string) bool { return strings.Contains(text, function) }
	if !calls("uantity") && !slices.ContainsFunc(regexFunctions, calls) {
		return compiled, nil
	}
	env, err := boundedQuantities.of(compiled.Environment)
	if err != nil {
		return compiled, err
	}
	ast, issues := env.Compile(text)
	if issues != nil {
		return compiled, issues.Err()
	}
	compiled.Program, err = env.Program(ast, celgo.CostLimit(resourceapi.CELSelectorExpressionMaxCost), celgo.InterruptCheckFrequency(1),
		regexConstants(), celgo.CustomDecoratorV2(boundRegexes))
	return compiled, err
}

// Compiled is a compiled expression.
type Compiled struct {
	cel.CompilationResult
	// Bytes is about how much memory it takes.
	Bytes int64
	// Reads is what it asks a device for.
	Reads Reads
}

// What a compiled expression takes of memory, as measured: by itself, for each byte of its text, and for each instruction of its patterns.
const (
	baseBytes           = 16 << 10
	bytesPerByte        = 25
	bytesPerInstruction = 64
)

// boundedQuantities keeps the environment that was made last. As of upstream's compilers, there is one in practice.
var boundedQuantities boundedEnv

type boundedEnv struct {
	mu               sync.Mutex
	base, withBounds *celgo.Env
}

// of returns the environment with our functions.
func (e *boundedEnv) of(base *celgo.Env) (*celgo.Env, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.base == base {
		return e.withBounds, nil
	}
	// Functions of the same overloads replace those of the base.
	text := []*celgo.Type{celgo.StringType}
	withBounds, err := base.Extend(
		celgo.Function("quantity", celgo.Overload("string_to_quantity", text, apiservercel.QuantityType, celgo.UnaryBinding(toQuantity))),
		celgo.Function("isQuantity", celgo.Overload("is_quantity_string", text, celgo.BoolType, celgo.UnaryBinding(isQuantity))),
	)
	if err != nil {
		return nil, fmt.Errorf("bound quantities in CEL: %w", err)
	}
	e.base, e.withBounds = base, withBounds
	return withBounds, nil
}

func toQuantity(arg ref.Val) ref.Val {
	text, ok := arg.Value().(string)
	if !ok {
		return types.MaybeNoSuchOverloadErr(arg)
	}
	if err := amount.CheckText(text); err != nil {
		return types.WrapErr(err)
	}
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return types.WrapErr(err)
	}
	return apiservercel.Quantity{Quantity: &q}
}

func isQuantity(arg ref.Val) ref.Val {
	if _, ok := arg.Value().(string); !ok {
		return types.MaybeNoSuchOverloadErr(arg)
	}
	return types.Bool(!types.IsError(toQuantity(arg)))
}
