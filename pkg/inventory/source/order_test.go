package source

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/inventory"
)

// bare is a source without informers; current is what upstream's tracker has.
func bare(current func() ([]*resourceapi.ResourceSlice, error)) *Source {
	return &Source{
		store:     inventory.NewStore(inventory.Options{Features: inventory.DefaultFeatures()}),
		slices:    make(map[string]*resourceapi.ResourceSlice),
		overtaken: sets.New[string](),
		current:   current,
	}
}

// permutations of the numbers below n.
func permutations(n int) [][]int {
	if n == 0 {
		return [][]int{nil}
	}
	var all [][]int
	for _, shorter := range permutations(n - 1) {
		for at := range n {
			all = append(all, slices.Insert(slices.Clone(shorter), at, n-1))
		}
	}
	return all
}

// TestChangesThatOvertakeEachOther: in whatever order the changes of a slice are delivered, the store has the slice as it is in the end, and
// listeners have heard of that last.
func TestChangesThatOvertakeEachOther(t *testing.T) {
	one, two, three := slice("pool", "d0"), slice("pool", "d0", "d1"), slice("pool", "d0", "d1", "d2")
	type change struct{ old, new *resourceapi.ResourceSlice }
	for name, changes := range map[string][]change{
		"it stays":            {{nil, one}, {one, two}, {two, three}},
		"it goes":             {{nil, one}, {one, two}, {two, nil}},
		"it is made anew":     {{nil, one}, {one, two}, {two, nil}, {nil, three}},
		"a change was silent": {{nil, one}, {two, three}},
	} {
		for _, order := range permutations(len(changes)) {
			t.Run(fmt.Sprint(name, order), func(t *testing.T) {
				var now []*resourceapi.ResourceSlice
				if last := changes[len(changes)-1].new; last != nil {
					now = append(now, last)
				}
				s := bare(func() ([]*resourceapi.ResourceSlice, error) { return now, nil })
				var heard *resourceapi.ResourceSlice
				s.AddListener(func(e Event) {
					if e.OldSlice != heard && !e.Deleted {
						t.Errorf("a change from %v, but what was heard last is %v", e.OldSlice, heard)
					}
					if heard = e.Slice; e.Deleted {
						heard = nil
					}
				})
				handler := s.sliceHandler()
				for _, i := range order {
					switch c := changes[i]; {
					case c.old == nil:
						handler.OnAdd(c.new, false)
					case c.new == nil:
						handler.OnDelete(c.old)
					default:
						handler.OnUpdate(c.old, c.new)
					}
				}
				want := changes[len(changes)-1].new
				devices := 0
				if want != nil {
					devices = len(want.Spec.Devices)
				}
				if got := deviceCount(s.store.View()); got != devices {
					t.Errorf("%d devices, want %d", got, devices)
				}
				if heard != want {
					t.Errorf("heard last: %v, want %v", heard, want)
				}
			})
		}
	}
}

// TestListenersAreCalledOneAtATime, although changes come from the goroutines of several informers. It needs the race detector.
func TestListenersAreCalledOneAtATime(t *testing.T) {
	s := bare(nil)
	var heard []string
	s.AddListener(func(e Event) {
		if e.Slice != nil {
			heard = append(heard, e.Slice.Name)
		} else {
			heard = append(heard, e.Class.Name)
		}
	})
	var group sync.WaitGroup
	for _, add := range []func(i int){
		func(i int) { s.sliceHandler().OnAdd(slice(fmt.Sprint("slice-", i)), false) },
		func(i int) { s.sliceHandler().OnAdd(slice(fmt.Sprint("tainted-", i)), false) },
		func(i int) { s.classHandler().OnAdd(class(fmt.Sprint("class-", i)), false) },
	} {
		group.Go(func() {
			for i := range 100 {
				add(i)
			}
		})
	}
	group.Wait()
	for _, kind := range []string{"slice-", "tainted-", "class-"} {
		of := slices.DeleteFunc(slices.Clone(heard), func(name string) bool { return !strings.HasPrefix(name, kind) })
		for i := range 100 {
			if i >= len(of) || of[i] != fmt.Sprint(kind, i) {
				t.Fatalf("%s: heard %v", kind, of)
			}
		}
	}
}
