// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/agent/stepaside"
)

// The runbook's table has every taint that the agent sets, with its effect, and no other.
func TestTheRunbookHasAllTaints(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "runbook.md"))
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `(gpu\\.nvidia\\.com/[a-z-]+)` \\| (\\w+) \\|").FindAllStringSubmatch(string(text), -1) {
		told[row[1]] = row[2]
	}
	want := map[string]string{}
	for _, taint := range []resourceapi.DeviceTaint{
		(&occupiedPlace{}).taint(), (&foreignUse{}).taint(), notReadyTaint(reasonFolderFull), pluginpath.Taint(Name, advertise.DevicePlugin),
	} {
		want[taint.Key] = string(taint.Effect)
	}
	for _, reason := range health.Reasons() {
		for _, taint := range taints(health.Verdict{Faults: []health.Fault{{Reason: reason}}}) {
			want[taint.Key] = string(taint.Effect)
		}
	}
	if diff := cmp.Diff(want, told); diff != "" {
		t.Errorf("taints (-code +runbook):\n%s", diff)
	}
	if want[TaintKey(health.Lost)] != string(resourceapi.DeviceTaintEffectNoExecute) {
		t.Error("a lost GPU does not move its pods")
	}
}

// Troubleshooting has a row for every reason of a condition, a taint or an event that the agent writes, and for no other.
func TestTroubleshootingHasAllReasons(t *testing.T) {
	// These say that all is well.
	well := sets.New(reasonPrepared, reasonHealthy, reasonAllGPUsReady, "AdvertiseChanged")
	// These are of a stage without which the agent is ready: readyz has its message alone.
	hidden := sets.New(reasonOtherPublishes, reasonNotPublished)
	// These are the kubelet's events.
	theirs := sets.New("FailedPrepareDynamicResources")

	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "troubleshooting.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, chapter, _ := strings.Cut(string(text), "\n## Node agent\n")
	chapter, _, _ = strings.Cut(chapter, "\n## ")
	told := sets.New[string]()
	for row := range strings.Lines(chapter) {
		shown, _, _ := strings.Cut(strings.TrimPrefix(row, "| "), " | ")
		for _, list := range regexp.MustCompile("(?:[Rr]easons?|[Ee]vents?)((?:(?:,| or| and)? `[A-Z][A-Za-z]+`)+)").FindAllStringSubmatch(shown, -1) {
			told.Insert(regexp.MustCompile("[A-Z][A-Za-z]+").FindAllString(list[1], -1)...)
		}
	}
	want := reasonsOf(t).Insert(stepaside.Released, stepaside.Replaced)
	if len(want) < 30 {
		t.Fatalf("only %v are found", sets.List(want))
	}
	if missing := want.Difference(told).Difference(well).Difference(hidden); missing.Len() > 0 {
		t.Errorf("no row of docs/troubleshooting.md has the reasons %v", sets.List(missing))
	}
	if unknown := told.Difference(want).Difference(theirs); unknown.Len() > 0 {
		t.Errorf("docs/troubleshooting.md has the reasons %v, which the agent does not write", sets.List(unknown))
	}
}

// reasonsOf are the constants of the package, and of the one that watches over the paths, that are called reason… and are words as conditions and events have them.
func reasonsOf(t *testing.T) sets.Set[string] {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	paths, err := filepath.Glob(filepath.Join("..", "pluginpath", "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	reasons := sets.New[string]()
	for _, file := range append(files, paths...) {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(node ast.Node) bool {
			spec, ok := node.(*ast.ValueSpec)
			for i := 0; ok && i < len(spec.Values); i++ {
				literal, isLiteral := spec.Values[i].(*ast.BasicLit)
				if !strings.HasPrefix(spec.Names[i].Name, "reason") || !isLiteral {
					continue
				}
				if word, err := strconv.Unquote(literal.Value); err == nil && word != strings.ToLower(word) {
					reasons.Insert(word)
				}
			}
			return true
		})
	}
	return reasons
}
