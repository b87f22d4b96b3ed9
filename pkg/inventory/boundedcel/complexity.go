// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package boundedcel

import (
	"errors"
	"fmt"
	"maps"

	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
)

// CEL counts what is done with a list by how many elements it has, not by what is in them: with cel.bind, an expression of some
// hundred bytes makes lists of lists, or texts out of texts with format(), of any size. To compare, or to print, those never ends or takes
// all memory, and nothing interrupts it. So what an expression can make is bounded before it is compiled.
const (
	// maxComplexity is how large the values may be that an expression makes, in sum: a value as whatever it is made of, a loop as often as it
	// may go round. Going through so much takes some hundred milliseconds.
	maxComplexity = 2e7
	// ofDevice is what a device counts, or whatever is of it: as many attributes and capacities as it may have, twice.
	ofDevice = 64
	// perByte is what each byte of a text counts.
	perByte = 1.0 / 16
	// ofRange is what lists.range counts whose length is not written there.
	ofRange = 1000
)

var errComplex = errors.New("the expression makes values that are too large")

// checkComplexity refuses expressions that take too long to compile or to evaluate, whatever CEL counts. It returns how many instructions
// their patterns have.
func checkComplexity(e ast.Expr) (instructions int, err error) {
	c := complexity{}
	v := c.of(e, map[string]extent{})
	switch {
	case c.err != nil:
		return 0, c.err
	case v.size > maxComplexity:
		return 0, fmt.Errorf("%w: about %.0e, not at most %.0e", errComplex, v.size, float64(maxComplexity))
	}
	return c.instructions, nil
}

// extent is how large a value is at most: with all that is made on the way, and if it is a list, how many elements it has, and how large
// one is.
type extent struct{ size, count, element float64 }

func uniform(size float64) extent { return extent{size, size, size} }

// complexity counts the instructions of all texts as if they were patterns, and has the error of the first that is too much.
type complexity struct {
	instructions int
	err          error
}

// of returns the extent of an expression. vars has those of macros' variables.
func (c *complexity) of(e ast.Expr, vars map[string]extent) extent {
	switch e.Kind() {
	case ast.LiteralKind:
		return uniform(c.ofLiteral(e.AsLiteral().Value()))
	case ast.IdentKind:
		if v, ok := vars[e.AsIdent()]; ok {
			return v
		}
		return uniform(ofDevice)
	case ast.SelectKind:
		return uniform(1 + c.of(e.AsSelect().Operand(), vars).size)
	case ast.ListKind:
		return c.together(vars, e.AsList().Elements()...)
	case ast.MapKind:
		var all []ast.Expr
		for _, entry := range e.AsMap().Entries() {
			all = append(all, entry.AsMapEntry().Key(), entry.AsMapEntry().Value())
		}
		return c.together(vars, all...)
	case ast.CallKind:
		return c.ofCall(e.AsCall(), vars)
	case ast.ComprehensionKind:
		return c.ofMacro(e.AsComprehension(), vars)
	}
	return uniform(1)
}

// together is a list of the values.
func (c *complexity) together(vars map[string]extent, all ...ast.Expr) extent {
	list := extent{size: 1, count: float64(len(all)), element: 1}
	for _, e := range all {
		v := c.of(e, vars)
		list.size, list.element = list.size+v.size, max(list.element, v.size)
	}
	return list
}

func (c *complexity) ofLiteral(value any) float64 {
	var text string
	switch value := value.(type) {
	case string:
		text = value
	case []byte: // string(b"...") is a constant
		text = string(value)
	}
	if c.err == nil {
		var size int
		if size, c.err = checkPattern(text); c.err == nil {
			c.instructions += size
			c.err = checkProgram(c.instructions)
		}
	}
	return 1 + perByte*float64(len(text))
}

func (c *complexity) ofCall(call ast.CallExpr, vars map[string]extent) extent {
	switch name := call.FunctionName(); name {
	case operators.Add:
		var sum extent
		for _, e := range call.Args() {
			v := c.of(e, vars)
			sum.size, sum.count, sum.element = sum.size+v.size, sum.count+v.count, max(sum.element, v.element)
		}
		return sum
	case operators.Conditional: // one of two; the condition costs, but is no part of it
		sum := extent{size: c.of(call.Args()[0], vars).size}
		for _, e := range call.Args()[1:] {
			v := c.of(e, vars)
			sum.size, sum.count, sum.element = sum.size+v.size, max(sum.count, v.count), max(sum.element, v.element)
		}
		return sum
	}
	size, target := c.together(vars, call.Args()...).size, 1.0
	if call.IsMemberFunction() {
		target = c.of(call.Target(), vars).size
	}
	switch call.FunctionName() {
	case "replace":
		if grows := growthOf(call.Args()); grows > 0 {
			return uniform(size + target*grows)
		}
		return uniform(size * target / perByte)
	case "join": // what is put in comes as often as there is place for it
		return uniform(size * target / perByte)
	case "format":
		return uniform((size + target) / perByte)
	case "range": // of lists
		return uniform(size + target + c.lengthOf(call.Args()))
	}
	return uniform(size + target)
}

// lengthOf is how many elements lists.range makes.
func (c *complexity) lengthOf(args []ast.Expr) float64 {
	if len(args) == 1 && args[0].Kind() == ast.LiteralKind {
		if n, ok := args[0].AsLiteral().Value().(int64); ok {
			return max(0, float64(n))
		}
	}
	return ofRange
}

// ofMacro is for what macros are expanded to: cel.bind has no elements, and its variable is the accumulator; in the others' steps the
// accumulator is what was there before.
func (c *complexity) ofMacro(loop ast.ComprehensionExpr, vars map[string]extent) extent {
	elements, v := c.of(loop.IterRange(), vars), c.of(loop.AccuInit(), vars)
	inner, after := maps.Clone(vars), maps.Clone(vars) // elements have names in the loop only
	inner[loop.IterVar()] = uniform(elements.element)
	if loop.HasIterVar2() {
		inner[loop.IterVar2()] = uniform(elements.element)
	}
	inner[loop.AccuVar()] = extent{size: 1, element: 1}
	step, condition := c.of(loop.LoopStep(), inner), c.of(loop.LoopCondition(), inner)
	after[loop.AccuVar()] = extent{
		size:    v.size + elements.count*(1+step.size+condition.size),
		count:   v.count + elements.count*step.count,
		element: max(v.element, step.element),
	}
	result := c.of(loop.Result(), after)
	result.size += elements.size + after[loop.AccuVar()].size
	return result
}

// growthOf is how many times as long replace with these arguments makes a text at most, 0 if that is not written there.
func growthOf(args []ast.Expr) float64 {
	if len(args) < 2 || args[0].Kind() != ast.LiteralKind || args[1].Kind() != ast.LiteralKind {
		return 0
	}
	from, _ := args[0].AsLiteral().Value().(string)
	to, ok := args[1].AsLiteral().Value().(string)
	if from == "" || !ok {
		return 0
	}
	return max(1, float64(len(to))/float64(len(from)))
}
