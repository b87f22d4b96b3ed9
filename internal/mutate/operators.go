// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"slices"
	"strings"
)

// mutant is one way in which the code is broken. Its ID is its place in the
// list, from 1: 0 is the code as it is.
type mutant struct {
	file, function string
	line           int
	what           string
	needsRace      bool // only the race detector sees it in a short run
}

// name says what a mutant is, without a line number, which would change with
// every edit.
func (m mutant) name() string { return fmt.Sprintf("%s %s: %s", m.file, m.function, m.what) }

// walk finds the mutants of one file, and the edits that put all of them in.
type walk struct {
	target   *target
	source   *source
	mutants  *[]mutant
	edits    []edit
	function string
	result   *types.Signature  // of the function around
	names    map[string]int    // to tell equal ones apart
	paired   map[ast.Stmt]bool // Unlocks that are dropped with their Lock
}

func (w *walk) mutant(at ast.Node, format string, args ...any) (id int) {
	what := fmt.Sprintf(format, args...)
	w.names[w.function+what]++
	if n := w.names[w.function+what]; n > 1 {
		what += fmt.Sprintf(" (%d)", n)
	}
	*w.mutants = append(*w.mutants, mutant{file: w.source.name, function: w.function, line: w.target.fset.Position(at.Pos()).Line, what: what})
	return len(*w.mutants)
}

// text is a node's source, shortened to one line.
func (w *walk) text(n ast.Node) string {
	text := strings.Join(strings.Fields(string(w.source.text[w.offset(n.Pos()):w.offset(n.End())])), " ")
	if runes := []rune(text); len(runes) > 70 {
		text = string(runes[:70]) + "…"
	}
	return text
}

func (w *walk) offset(p token.Pos) int { return w.target.fset.Position(p).Offset }

func (w *walk) file() {
	for _, decl := range w.source.syntax.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		w.function = f.Name.Name
		if f.Recv != nil {
			w.function = types.ExprString(f.Recv.List[0].Type) + "." + w.function
		}
		w.result, _ = w.target.info.Defs[f.Name].Type().(*types.Signature)
		w.block(f.Body.List, w.result.Results().Len() == 0)
	}
}

// block goes through the statements of a block. free tells that control may
// leave its end: a return in it can be dropped.
func (w *walk) block(list []ast.Stmt, free bool) {
	for i, s := range list {
		w.statement(s, free, list[i:])
	}
}

func (w *walk) statement(s ast.Stmt, free bool, rest []ast.Stmt) {
	switch s := s.(type) {
	case *ast.ExprStmt:
		if w.isLog(s.X) {
			return
		}
		if !w.lock(s, rest) {
			w.drop(s)
		}
		w.expression(s.X)
	case *ast.AssignStmt:
		if s.Tok != token.DEFINE {
			w.drop(s)
		}
		for _, e := range s.Rhs {
			w.expression(e)
		}
	case *ast.IncDecStmt, *ast.SendStmt, *ast.GoStmt, *ast.BranchStmt:
		w.drop(s)
	case *ast.DeferStmt:
		// What go vet's lostcancel finds, no test has to.
		if f, ok := s.Call.Fun.(*ast.FuncLit); ok && w.allLog(f.Body.List) || w.text(s) == "defer cancel()" {
			return
		}
		if !w.paired[s] {
			w.drop(s)
		}
		w.expression(s.Call)
	case *ast.ReturnStmt:
		w.returns(s, free)
	case *ast.BlockStmt:
		w.block(s.List, free)
	case *ast.IfStmt:
		if w.onlyLogs(s) {
			return
		}
		if s.Init != nil {
			w.simple(s.Init)
		}
		w.condition(s.Cond, true)
		w.block(s.Body.List, free || s.Else == nil)
		if s.Else != nil {
			w.statement(s.Else, free, nil)
		}
	case *ast.ForStmt:
		if s.Cond != nil {
			w.drop(s)
			w.condition(s.Cond, false)
		}
		w.block(s.Body.List, true)
	case *ast.RangeStmt:
		w.drop(s)
		w.expression(s.X)
		w.block(s.Body.List, true)
	case *ast.SwitchStmt:
		for _, c := range s.Body.List {
			c := c.(*ast.CaseClause)
			if s.Tag == nil {
				for _, e := range c.List {
					w.condition(e, true)
				}
			}
			w.block(c.Body, free)
		}
	case *ast.TypeSwitchStmt:
		for _, c := range s.Body.List {
			w.block(c.(*ast.CaseClause).Body, free)
		}
	case *ast.SelectStmt:
		for _, c := range s.Body.List {
			w.block(c.(*ast.CommClause).Body, free)
		}
	}
}

// simple is a statement in front of a condition, which cannot be dropped.
func (w *walk) simple(s ast.Stmt) {
	if s, ok := s.(*ast.AssignStmt); ok {
		for _, e := range s.Rhs {
			w.expression(e)
		}
	}
}

// drop drops a statement.
func (w *walk) drop(s ast.Stmt) {
	id := w.mutant(s, "drop %s", w.text(s))
	w.wrap(s, fmt.Sprintf("if !mutantIs(%d) { ", id), " }")
}

// lock drops a Lock together with the deferred Unlock that follows it, if there
// is one. Alone, either is a fatal error or a deadlock, which proves nothing and
// takes long.
func (w *walk) lock(s *ast.ExprStmt, rest []ast.Stmt) bool {
	if len(rest) < 2 || !strings.HasSuffix(w.text(s), ".Lock()") {
		return false
	}
	unlock, ok := rest[1].(*ast.DeferStmt)
	if !ok || !strings.HasSuffix(w.text(unlock), ".Unlock()") {
		return false
	}
	id := w.mutant(s, "drop %s with its Unlock", w.text(s))
	(*w.mutants)[id-1].needsRace = true
	for _, s := range rest[:2] {
		w.wrap(s, fmt.Sprintf("if !mutantIs(%d) { ", id), " }")
	}
	w.paired[unlock] = true
	return true
}

// returns mutates a return: other results, or none of it where control may go on.
func (w *walk) returns(s *ast.ReturnStmt, free bool) {
	if free {
		w.drop(s)
	}
	for i, e := range s.Results {
		if b, ok := w.target.info.TypeOf(e).Underlying().(*types.Basic); ok && b.Info()&types.IsBoolean != 0 {
			w.condition(e, true)
			continue
		}
		if len(s.Results) == w.result.Results().Len() {
			w.zero(e, w.result.Results().At(i).Type(), "return the zero value instead of %s")
		}
		w.expression(e)
	}
}

// condition makes a condition true or false for ever, or drops one of its
// operands.
func (w *walk) condition(e ast.Expr, also bool) {
	if also && w.text(e) != "true" {
		w.always(e, true, w.mutant(e, "%s is always true", w.text(e)))
	}
	if w.text(e) != "false" {
		w.always(e, false, w.mutant(e, "%s is always false", w.text(e)))
	}
	w.expression(e)
}

// always decides a condition. That makes a difference to a run in which it is
// otherwise once or, if evaluating it does something, in which it is evaluated.
func (w *walk) always(e ast.Expr, value bool, id int) {
	pure := w.pure(e)
	switch {
	case value && pure:
		w.wrap(e, fmt.Sprintf("(mutantOn == %d || (", id), fmt.Sprintf(") || mutantDiffers(%d))", id))
	case value:
		w.wrap(e, fmt.Sprintf("(mutantIs(%d) || (", id), "))")
	case pure:
		w.wrap(e, fmt.Sprintf("(mutantOn != %d && (", id), fmt.Sprintf(") && !mutantDiffers(%d))", id))
	default:
		w.wrap(e, fmt.Sprintf("(!mutantIs(%d) && (", id), "))")
	}
}

// lookers are functions that do no more than look at what they are given.
var lookers = []string{
	"errors.Is", "reflect.DeepEqual", "slices.Contains", "slices.ContainsFunc", "slices.Equal", "slices.Index", "slices.IndexFunc",
	"strings.Contains", "strings.HasPrefix", "strings.HasSuffix",
}

// pure tells whether it makes no difference in itself that an expression is evaluated.
func (w *walk) pure(e ast.Expr) bool {
	pure := true
	ast.Inspect(e, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			f := w.target.info.Types[n.Fun]
			pure = pure && (f.IsType() || f.IsBuiltin() || slices.Contains(lookers, w.text(n.Fun)))
		case *ast.UnaryExpr:
			pure = pure && n.Op != token.ARROW
		case *ast.IncDecStmt, *ast.SendStmt, *ast.GoStmt:
			pure = false
		case *ast.AssignStmt: // in a function
			pure = pure && n.Tok == token.DEFINE
		}
		return pure
	})
	return pure
}

// expression goes through an expression for what can be broken in it.
func (w *walk) expression(e ast.Expr) {
	switch e := e.(type) {
	case *ast.ParenExpr:
		w.expression(e.X)
	case *ast.UnaryExpr:
		w.expression(e.X)
	case *ast.StarExpr:
		w.expression(e.X)
	case *ast.SelectorExpr:
		w.expression(e.X)
	case *ast.IndexExpr:
		w.expression(e.X)
	case *ast.BinaryExpr:
		w.binary(e)
	case *ast.CallExpr:
		w.expression(e.Fun)
		for _, a := range e.Args {
			w.expression(a)
		}
	case *ast.CompositeLit:
		for _, element := range e.Elts {
			if kv, ok := element.(*ast.KeyValueExpr); ok {
				if _, isStruct := w.target.info.TypeOf(e).Underlying().(*types.Struct); isStruct {
					w.zero(kv.Value, w.target.info.TypeOf(kv.Key), types.ExprString(kv.Key)+" is not set to %s")
				}
				w.expression(kv.Value)
			} else {
				w.expression(element)
			}
		}
	case *ast.FuncLit:
		outer := w.result
		w.result = w.target.info.TypeOf(e).(*types.Signature)
		w.block(e.Body.List, w.result.Results().Len() == 0)
		w.result = outer
	}
}

var boundary = map[token.Token]string{token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">"}

func (w *walk) binary(e *ast.BinaryExpr) {
	switch e.Op {
	case token.LAND, token.LOR:
		for _, operand := range []ast.Expr{e.X, e.Y} {
			w.always(operand, e.Op == token.LAND, w.mutant(operand, "without %s in %s", w.text(operand), w.text(e)))
		}
	case token.LSS, token.LEQ, token.GTR, token.GEQ:
		if w.target.info.Types[e].Value == nil {
			id := w.mutant(e, "%s with %s", w.text(e), boundary[e.Op])
			w.wrap(e, fmt.Sprintf("mutantOrder(%d, %q, ", id, e.Op), ")")
			w.replace(e.OpPos, len(e.Op.String()), ",")
		}
	case token.ADD, token.SUB:
		t, ok := w.target.info.TypeOf(e).Underlying().(*types.Basic)
		if ok && t.Info()&types.IsNumeric != 0 && w.target.info.Types[e].Value == nil {
			id := w.mutant(e, "%s without the second operand", w.text(e))
			w.wrap(e, fmt.Sprintf("mutantSum(%d, %q, ", id, e.Op), ")")
			w.replace(e.OpPos, 1, ",")
		}
	}
	w.expression(e.X)
	w.expression(e.Y)
}

// zero puts the zero value of a type in the place of an expression.
func (w *walk) zero(e ast.Expr, to types.Type, format string) {
	_, literal := e.(*ast.BasicLit)
	if literal || w.isZero(e) || strings.HasSuffix(to.String(), "logr.Logger") {
		return
	}
	before := "mutantZero(%d, "
	switch {
	case types.Identical(to, types.Universe.Lookup("error").Type()):
		before = "mutantZero[error](%d, "
	case !types.Identical(to, w.target.info.TypeOf(e)):
		return // its zero value would not be that of the place
	}
	id := w.mutant(e, format, w.text(e))
	w.wrap(e, fmt.Sprintf(before, id), ")")
}

func (w *walk) isZero(e ast.Expr) bool {
	lit, ok := e.(*ast.CompositeLit)
	return ok && len(lit.Elts) == 0 || w.text(e) == "nil"
}

// onlyLogs tells whether a statement decides no more than what is logged.
func (w *walk) onlyLogs(s *ast.IfStmt) bool { return s.Else == nil && w.allLog(s.Body.List) }

// allLog tells whether statements do no more than write to the log.
func (w *walk) allLog(list []ast.Stmt) bool {
	return !slices.ContainsFunc(list, func(s ast.Stmt) bool {
		switch s := s.(type) {
		case *ast.ExprStmt:
			return !w.isLog(s.X)
		case *ast.IfStmt:
			return !w.onlyLogs(s)
		}
		return true
	})
}

// isLog tells whether an expression writes to the log, which tests do not read.
func (w *walk) isLog(e ast.Expr) bool {
	text := w.text(e)
	return slices.ContainsFunc([]string{"logger.", "klog."}, func(s string) bool { return strings.Contains(text, s) }) &&
		slices.ContainsFunc([]string{".Info(", ".Error("}, func(s string) bool { return strings.Contains(text, s) })
}
