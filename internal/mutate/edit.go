// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/token"
	"slices"
	"strings"
)

// edit replaces some text. Nothing that is put in contains a line break, so that
// lines keep their numbers.
type edit struct {
	from, to int
	text     string
	// order among edits at the same place: what ends there, ends first, inner
	// before outer; then begins what begins there, outer before inner.
	order int
}

func (w *walk) wrap(n ast.Node, before, after string) {
	w.edits = append(w.edits,
		edit{w.offset(n.Pos()), w.offset(n.Pos()), before, len(w.edits) + 1},
		edit{w.offset(n.End()), w.offset(n.End()), after, -len(w.edits) - 1})
}

func (w *walk) replace(at token.Pos, length int, text string) {
	w.edits = append(w.edits, edit{w.offset(at), w.offset(at) + length, text, len(w.edits) + 1})
}

// mutated returns the text of the file with all its mutants in it.
func (w *walk) mutated() string {
	slices.SortStableFunc(w.edits, func(a, b edit) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.order, b.order)) })
	var text strings.Builder
	at := 0
	for _, e := range w.edits {
		text.Write(w.source.text[at:e.from])
		text.WriteString(e.text)
		at = e.to
	}
	text.Write(w.source.text[at:])
	return text.String()
}

// switches is the file that is added to a package: which mutant is on, which ones
// would make a difference in a run if that is asked for, and the operations that a
// mutant changes.
func switches(name string, mutants int) string {
	return fmt.Sprintf(`package %s

import (
	mutantCmp "cmp"
	mutantOS "os"
	mutantReflect "reflect"
	mutantStrconv "strconv"
	mutantAtomic "sync/atomic"
)

var mutantOn = func() int { n, _ := mutantStrconv.Atoi(mutantOS.Getenv(%q)); return n }()

var mutantReached = func() *mutantOS.File {
	path := mutantOS.Getenv(%q)
	if path == "" {
		return nil
	}
	file, err := mutantOS.OpenFile(path, mutantOS.O_APPEND|mutantOS.O_CREATE|mutantOS.O_WRONLY, 0o600)
	if err != nil {
		panic(err)
	}
	return file
}()

var mutantSeen [%d]mutantAtomic.Bool

// mutantDiffers notes that the run would go on differently with the mutant. It is false.
func mutantDiffers(id int) bool {
	if mutantReached != nil && !mutantSeen[id].Swap(true) {
		if _, err := mutantReached.WriteString(mutantStrconv.Itoa(id) + "\n"); err != nil {
			panic(err)
		}
	}
	return false
}

func mutantIs(id int) bool { return mutantDiffers(id) || mutantOn == id }

func mutantZero[T any](id int, value T) T {
	if mutantOn == id {
		var zero T
		return zero
	}
	if mutantReached != nil && !mutantReflect.ValueOf(&value).Elem().IsZero() {
		mutantDiffers(id)
	}
	return value
}

func mutantOrder[T mutantCmp.Ordered](id int, op string, a, b T) bool {
	orEqual := op == "<=" || op == ">="
	if mutantOn == id {
		orEqual = !orEqual
	}
	if a == b {
		mutantDiffers(id)
		return orEqual
	}
	return (a < b) == (op == "<" || op == "<=")
}

func mutantSum[T ~int | ~int8 | ~int16 | ~int32 | ~int64 | ~uint | ~uint8 | ~uint16 | ~uint32 | ~uint64 |
	~float32 | ~float64](id int, op string, a, b T) T {
	if b != 0 {
		mutantDiffers(id)
	}
	switch {
	case mutantOn == id:
		return a
	case op == "+":
		return a + b
	default:
		return a - b
	}
}

var _, _, _ = mutantZero[int], mutantOrder[int], mutantSum[int]
`, name, environment, reachedFile, mutants+1)
}

const (
	environment = "STOWAGE_MUTANT"
	reachedFile = "STOWAGE_MUTANTS_REACHED"
)
