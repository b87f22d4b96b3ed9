// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package boundedcel

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"regexp/syntax"
	"slices"

	celgo "github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/interpreter"
)

// CEL counts regular expressions by the length of the text and of the pattern. What is repeated counts once: (a?){1000} is ten
// bytes and two thousand instructions, each of which may be looked at for each byte of the text, and nothing interrupts that.
const (
	// maxProgram is how many instructions the patterns may have that are written in an expression: compiling them takes some milliseconds.
	maxProgram = 20_000
	// maxRegexSteps bounds one call whose pattern has more instructions than bytes, to about two milliseconds. For attributes, which have
	// 64 bytes, it is 2,000 instructions.
	maxRegexSteps = 1 << 17
	// plainSlack is how many instructions more than bytes a pattern without repetitions may have.
	plainSlack = 16
)

var errRegex = errors.New("the regular expression takes too long")

// boundedRegex is a compiled pattern whose calls take a bounded time.
type boundedRegex struct {
	re   *regexp.Regexp
	size int
	// plain patterns have no more instructions than CEL has counted.
	plain bool
}

func newBoundedRegex(pattern string) (*boundedRegex, error) {
	size, err := checkPattern(pattern)
	if err != nil {
		return nil, err
	}
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, err
	}
	return &boundedRegex{re: re, size: size, plain: size <= len(pattern)+plainSlack}, nil
}

// call calls the function with the text, and for findAll with how many matches are wanted.
func (b *boundedRegex) call(function string, args ...ref.Val) ref.Val {
	text, ok := args[0].Value().(string)
	if !ok {
		return types.MaybeNoSuchOverloadErr(args[0])
	}
	steps := (len(text) + 1) * b.size
	if function == "findAll" {
		steps *= len(text) + 1 // each match may look at all that is left
	}
	if steps > maxRegexSteps && (function == "findAll" || !b.plain) {
		return types.WrapErr(fmt.Errorf("%w: about %d instructions for %d bytes", errRegex, b.size, len(text)))
	}
	switch function {
	case "matches":
		return types.Bool(b.re.MatchString(text))
	case "find":
		return types.String(b.re.FindString(text))
	}
	wanted := int64(-1)
	if len(args) == 3 {
		if wanted, ok = args[2].Value().(int64); !ok {
			return types.MaybeNoSuchOverloadErr(args[2])
		}
	}
	return types.NewStringList(types.DefaultTypeAdapter, b.re.FindAllString(text, int(wanted)))
}

// regexCall is the function for patterns that are not known before.
func regexCall(function string) func(...ref.Val) ref.Val {
	return func(args ...ref.Val) ref.Val {
		pattern, ok := args[1].Value().(string)
		if !ok {
			return types.MaybeNoSuchOverloadErr(args[1])
		}
		b, err := newBoundedRegex(pattern)
		if err != nil {
			return types.WrapErr(err)
		}
		return b.call(function, args...)
	}
}

// boundRegexes makes calls whose pattern is not known before take a bounded time. The function cannot be replaced: CEL's matches has
// one implementation for all overloads.
func boundRegexes(i interpreter.InterpretableV2) (interpreter.InterpretableV2, error) {
	call, ok := i.(interpreter.InterpretableCall)
	if !ok || len(call.Args()) < 2 || !slices.Contains(regexFunctions, call.Function()) {
		return i, nil
	}
	return interpreter.NewCall(call.ID(), call.Function(), call.OverloadID(), call.Args(), regexCall(call.Function())), nil
}

var regexFunctions = []string{"matches", "find", "findAll"}

// regexConstants compiles constant patterns once, in place of upstream's optimizations, which are found by the function only.
func regexConstants() celgo.ProgramOption {
	var all []*interpreter.RegexOptimization
	for overload, function := range map[string]string{
		"matches": "matches", "matches_string": "matches", "string_find_string": "find",
		"string_find_all_string": "findAll", "string_find_all_string_int": "findAll",
	} {
		all = append(all, &interpreter.RegexOptimization{
			Function: function, OverloadID: overload, RegexIndex: 1,
			Factory: func(call interpreter.InterpretableCall, pattern string) (interpreter.InterpretableCall, error) {
				b, err := newBoundedRegex(pattern)
				if err != nil {
					return nil, err
				}
				return interpreter.NewCall(call.ID(), call.Function(), call.OverloadID(), call.Args(), func(args ...ref.Val) ref.Val {
					return b.call(function, args...)
				}), nil
			},
		})
	}
	return celgo.OptimizeRegex(all...)
}

// checkPattern says about how many instructions the text is compiled to, 0 if it is no pattern. The error is that it is too many.
func checkPattern(pattern string) (size int, err error) {
	re, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		return 0, nil //nolint:nilerr // It is for those who compile it to say so.
	}
	size = sizeOf(re)
	return size, checkProgram(size)
}

func checkProgram(size int) error {
	if size > maxProgram {
		return fmt.Errorf("%w: about %d instructions, not at most %d", errRegex, size, maxProgram)
	}
	return nil
}

// sizeOf counts before anything is compiled: repetitions are written out then.
func sizeOf(re *syntax.Regexp) int {
	size := 1
	if re.Op == syntax.OpLiteral {
		size = len(re.Rune)
	}
	for _, sub := range re.Sub {
		size = min(size+sizeOf(sub), math.MaxInt32)
	}
	if re.Op == syntax.OpRepeat {
		size = min(size*max(1, re.Min+1, re.Max), math.MaxInt32)
	}
	return size
}
