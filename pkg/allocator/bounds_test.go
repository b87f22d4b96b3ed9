// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"fmt"
	"strings"
	"testing"
)

// What package explain permits.
const maxExplanation, maxQuoted, maxNamed = 800, 80, 3

// Names as long as the API has them, in all places at once: each is cut, and the way out is told.
func TestLongNamesLeaveRoomForTheWayOut(t *testing.T) {
	long := func(name string) string { return name + strings.Repeat("-x", 120) }
	w := rig().node(long("n"), gpus(5)...)
	held := map[string][]string{}
	for i := range 5 {
		held[long(fmt.Sprintf("held-%d", i))] = []string{fmt.Sprintf("%s/gpu-%d", long("n"), i)}
	}
	for i := range 5 {
		w.claim(long(fmt.Sprintf("c-%d", i)), exactly("gpu", 1))
	}
	e := w.explain(t, held)
	text := e.String()
	cut := func(text string) string { return text[:maxQuoted-len("…")] + "…" }
	want := fmt.Sprintf("; would fit on node %s if claims ", cut(long("n")))
	for i := range maxNamed {
		want += cut("default/"+long(fmt.Sprintf("held-%d", i))) + ", "
	}
	want = strings.TrimSuffix(want, ", ") + " and 2 more were released"
	if len(text) > maxExplanation || !strings.HasSuffix(text, want) {
		t.Errorf("%d bytes, at most %d, want the end %q:\n%s", len(text), maxExplanation, want, text)
	}
}

// No more than the most promising eight nodes are looked at, and each is decided at most 256 times.
func TestHoldersAreLookedForOnSomeNodesAndForSomeTime(t *testing.T) {
	w := rig().claim("c", exactly("gpu", 1))
	held := map[string][]string{}
	for i := range 9 {
		name := fmt.Sprintf("n%d", i)
		w.node(name, gpus(1)...)
		held["on-"+name] = []string{name + "/gpu-0"}
	}
	if got := len(w.findHolders(t, held, HolderOptions{})); got != 8 {
		t.Errorf("holders on %d nodes, want 8", got)
	}
	var options HolderOptions
	options.setDefaults()
	if options.Decisions != 256 {
		t.Errorf("%d decisions, want 256", options.Decisions)
	}
}
