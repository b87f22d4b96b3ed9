package tracker

import (
	"fmt"
	"strconv"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// BenchmarkSnapshotAndApply takes a snapshot, applies an event that allocates a
// device and one that frees it, with very many or few devices held (I6).
func BenchmarkSnapshotAndApply(b *testing.B) {
	for _, held := range []int{1_000, 10_000, 100_000} {
		b.Run(fmt.Sprintf("held=%d", held), func(b *testing.B) {
			tr := quiet()
			objs := make([]any, 0, held)
			for i := range held {
				name := strconv.Itoa(i)
				objs = append(objs, claim(name, types.UID(name), i+1, device("node-"+strconv.Itoa(i/8), "gpu-"+strconv.Itoa(i%8))))
			}
			must(b, tr.Store().Replace(objs, strconv.Itoa(held+1)))
			store, target := tr.Store(), device("node-7", "gpu-new")
			events := [2]*resourceapi.ResourceClaim{claim("new", "new", 0), claim("new", "new", 0, target)}
			revision := held + 1
			b.ReportAllocs()
			for b.Loop() {
				for i := range events {
					revision++
					event := *events[1-i]
					event.ResourceVersion = strconv.Itoa(revision)
					must(b, store.Update(&event))
					if held := tr.Snapshot().Usage.Device(target) != nil; held != (i == 0) {
						b.Fatal("the snapshot does not show the event")
					}
				}
			}
		})
	}
}
