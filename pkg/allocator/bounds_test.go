package allocator

import (
	"context"
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/allocator/internal/packing"
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

// zigzag has two devices with each of so many values of a and of b, and none that are alike in both, but for two of the last value of a
// if it fits. A claim wants two that are.
func zigzag(values int, fits bool) *world {
	w := rig().node("n1", numbered(2*values, map[string]func(int) int{
		"a": func(i int) int { return i / 2 },
		"b": func(i int) int {
			if fits && i == 2*values-1 {
				i--
			}
			return (i + 1) / 2 % values
		},
	})...)
	return w.claim("c", exactly("one", 1), exactly("two", 1)).match("a").match("b")
}

// thorough is a search that is about to begin with all shortcuts.
func (w *world) thorough(t *testing.T) *search {
	t.Helper()
	_, in := w.compile(t)
	in.Node = w.nodes[0]
	devices := in.Inventory.ForNode(in.Node)
	if len(devices.Problems) > 0 {
		t.Fatal(devices.Problems[0])
	}
	s := newSearch(context.Background(), in, devices)
	t.Cleanup(s.release)
	for _, a := range s.reqs.lanes {
		if !s.prepare(a) {
			t.Fatal("too few devices for a request")
		}
	}
	s.begin(s.order)
	s.classify()
	return s
}

// fits is what the search comes to in the end.
func (w *world) fits(t *testing.T) bool {
	t.Helper()
	_, in := w.compile(t)
	in.Node = w.nodes[0]
	result := Check(context.Background(), in)
	if !result.Fits() && result.Failure.Reason != explain.ReasonConstraints {
		t.Errorf("refused: %s", result.Failure)
	}
	return result.Fits()
}

// Of more values than a shortcut looks at it does not say that none would do. The search finds out, either way.
func TestMoreValuesThanAreLookedAt(t *testing.T) {
	for _, tc := range []struct {
		values              int
		fits                bool
		flowKnows, promises bool
	}{
		{values: maxValues, flowKnows: true},
		{values: maxValues, fits: true, flowKnows: true, promises: true},
		{values: maxValues + 1, flowKnows: true, promises: true},
		{values: maxValues + 1, fits: true, flowKnows: true, promises: true},
		{values: maxFlows, flowKnows: true, promises: true},
		{values: maxFlows + 1, promises: true},
		{values: maxFlows + 1, fits: true, promises: true},
	} {
		t.Run(fmt.Sprintf("%d values, fits %t", tc.values, tc.fits), func(t *testing.T) {
			w := zigzag(tc.values, tc.fits)
			s := w.thorough(t)
			if possible, known := s.pruning.decideByFlow(0); known != tc.flowKnows || known && possible != tc.fits {
				t.Errorf("by flow possible: %t, known: %t, want %t, %t", possible, known, tc.fits, tc.flowKnows)
			}
			if got := s.pruning.promising(-1, 0, 0); got != tc.promises {
				t.Errorf("promising: %t, want %t", got, tc.promises)
			}
			if got := w.fits(t); got != tc.fits {
				t.Errorf("fits: %t, want %t", got, tc.fits)
			}
		})
	}
}

// partsOf is one GPU with so much of a counter, and so many parts of each kind that take one of it, and a request for some of each kind.
func partsOf(total, kinds, each int, wanted int64) *world {
	devices := numbered(kinds*each, map[string]func(int) int{"kind": func(i int) int { return i / each }})
	for i := range devices {
		devices[i].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{
			CounterSet: "gpu", Counters: map[string]resourceapi.Counter{"x": {Value: resource.MustParse("1")}},
		}}
	}
	var requests []resourceapi.DeviceRequest
	for k := range kinds {
		requests = append(requests, exactly(fmt.Sprintf("kind-%d", k), wanted, kind(k)))
	}
	return rig().node("n1", devices...).counters("n1", "gpu", "x", fmt.Sprint(total)).claim("c", requests...)
}

// Whether parts can be cut from what there is, is not said where there are more kinds of them than are told apart, or more ways to
// cut them than are looked at. The search finds out, either way.
func TestMorePartsThanArePacked(t *testing.T) {
	for name, tc := range map[string]struct {
		total, kinds, each int
		wanted             int64
		packable, fits     bool
	}{
		"as many kinds as are told apart":                 {total: packing.MaxKinds, kinds: packing.MaxKinds, each: 1, wanted: 1, packable: true, fits: true},
		"as many kinds as are told apart, and too little": {total: packing.MaxKinds - 1, kinds: packing.MaxKinds, each: 1, wanted: 1},
		"more kinds":                        {total: packing.MaxKinds + 1, kinds: packing.MaxKinds + 1, each: 1, wanted: 1, packable: true, fits: true},
		"more kinds, and too little":        {total: packing.MaxKinds, kinds: packing.MaxKinds + 1, each: 1, wanted: 1, packable: true},
		"few ways":                          {total: 4, kinds: 2, each: 4, wanted: 2, packable: true, fits: true},
		"few ways, and too little":          {total: 3, kinds: 2, each: 4, wanted: 2},
		"more ways than are looked at":      {total: 6, kinds: 2, each: 6, wanted: 3, packable: true, fits: true},
		"more ways, and too little of each": {total: 5, kinds: 2, each: 8, wanted: 3, packable: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := partsOf(tc.total, tc.kinds, tc.each, tc.wanted)
			s := w.thorough(t)
			requests, ok := s.pruning.openRequests(-1, 0, 0)
			if !ok {
				t.Fatal("too few devices for a request")
			}
			if got := s.pruning.packable(requests); got != tc.packable {
				t.Errorf("packable: %t, want %t", got, tc.packable)
			}
			if got := w.fits(t); got != tc.fits {
				t.Errorf("fits: %t, want %t", got, tc.fits)
			}
		})
	}
}

// States beyond are searched anew; what is known stays known.
func TestKnownStatesAreBounded(t *testing.T) {
	c := &classes{known: map[string]bool{}}
	for i := range maxKnown + 2 {
		c.remember(fmt.Sprint(i), true)
	}
	if _, known := c.known[fmt.Sprint(maxKnown)]; known || len(c.known) != maxKnown || !c.known["0"] {
		t.Errorf("%d states are known, at most %d", len(c.known), maxKnown)
	}
}
