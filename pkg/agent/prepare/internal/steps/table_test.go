// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"testing"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// Each kind that the ledger names can be undone, and no other.
func TestTheTableHasEachKindOfStep(t *testing.T) {
	kinds := NewTable(Effects{}).kinds
	file, err := parser.ParseFile(token.NewFileSet(), "../../../ledger/entry.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	ast.Inspect(file, func(node ast.Node) bool {
		spec, ok := node.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if of, ok := spec.Type.(*ast.Ident); !ok || of.Name != "StepKind" {
			return true
		}
		value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		named++
		if kinds[ledger.StepKind(value)].undo == nil {
			t.Errorf("%s cannot be undone", value)
		}
		return true
	})
	if named != len(kinds) || named == 0 {
		t.Errorf("the ledger names %d kinds, and the table has %d", named, len(kinds))
	}
}

func TestAStepOfANewerAgentIsNeitherDoneNorUndone(t *testing.T) {
	table, step := NewTable(Effects{}), ledger.Step{Kind: "Prayer", Target: "GPU-1", GPU: "gpu-0"}
	if err := table.Do(t.Context(), &Claim{}, step); !errors.Is(err, errUnknown) {
		t.Errorf("done: %v", err)
	}
	if err := table.Undo(t.Context(), &ledger.Entry{}, step); !errors.Is(err, errUnknown) {
		t.Errorf("undone: %v", err)
	}
}

// booted is a machine that has been, since a boot, or of which that cannot be known.
type booted struct {
	Hardware
	id  string
	err error
}

func (b booted) BootID() (string, error) { return b.id, b.err }

func TestWhatIsLeftIsUndone(t *testing.T) {
	unreadable := errors.New("unreadable")
	for name, tc := range map[string]struct {
		kind    kind
		step    ledger.Step
		kept    bool
		keptErr error
		machine booted
		undone  bool
		err     error
	}{
		"the claim's own":                         {machine: booted{id: "1"}, undone: true},
		"others share it":                         {step: ledger.Step{Shared: true}, kept: true, machine: booted{id: "1"}},
		"nobody else shares it any more":          {step: ledger.Step{Shared: true}, machine: booted{id: "1"}, undone: true},
		"whether others share it is not known":    {step: ledger.Step{Shared: true}, keptErr: unreadable, machine: booted{id: "1"}, err: unreadable},
		"others have shares, and it is its own":   {kept: true, machine: booted{id: "1"}, undone: true},
		"a reboot has ended it":                   {machine: booted{id: "2"}},
		"a reboot has not ended it":               {kind: kind{outlives: true}, machine: booted{id: "2"}, undone: true},
		"whether there was a reboot is not known": {machine: booted{err: unreadable}, err: unreadable},
	} {
		t.Run(name, func(t *testing.T) {
			undone := false
			tc.kind.undo = func(context.Context, *ledger.Entry, ledger.Step) error { undone = true; return nil }
			table := &Table{
				gpus: GPUs{Hardware: tc.machine}, kinds: map[ledger.StepKind]kind{"": tc.kind},
				kept: func(*ledger.Entry, string) (bool, error) { return tc.kept, tc.keptErr },
			}
			if err := table.Undo(t.Context(), &ledger.Entry{BootID: "1"}, tc.step); !errors.Is(err, tc.err) || undone != tc.undone {
				t.Errorf("undone %v, %v; want %v, %v", undone, err, tc.undone, tc.err)
			}
		})
	}
}
