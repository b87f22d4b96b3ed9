package driver

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/health"
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
	for _, taint := range []resourceapi.DeviceTaint{(&occupiedPlace{}).taint(), (&foreignUse{}).taint(), notReadyTaint(reasonFolderFull)} {
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
