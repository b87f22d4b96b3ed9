package fence

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// BenchmarkFence is what a bind costs that is observed already: an event that
// allocates a claim, the fence, and an event that takes the allocation back, on
// nodes of 8 GPUs of which half are held. "events" is the two events alone, in a
// tracker without judge.
func BenchmarkFence(b *testing.B) {
	for _, nodes := range []int{500, 5000} {
		for _, fenced := range []bool{false, true} {
			name := "events"
			if fenced {
				name = "fence"
			}
			b.Run(fmt.Sprintf("%s/nodes=%d", name, nodes), func(b *testing.B) {
				var slices []*resourceapi.ResourceSlice
				claims := []any{}
				for n := range nodes {
					pool := "node-" + strconv.Itoa(n)
					var devices []resourceapi.Device
					for d := range 8 {
						devices = append(devices, whole("gpu-"+strconv.Itoa(d)))
					}
					slices = append(slices, slice(pool, devices...))
					claims = append(claims, claim("held-"+strconv.Itoa(n), n+1,
						results{}.device(pool, "gpu-0").device(pool, "gpu-1").device(pool, "gpu-2").device(pool, "gpu-3")))
				}
				store := inventoryOf(slices...)
				var options []tracker.Option
				if fenced {
					options = append(options, tracker.WithJudge(NewJudge(store.View)))
				}
				t := tracker.New(klog.Logger{}, options...)
				if err := t.Store().Replace(claims, strconv.Itoa(nodes+1)); err != nil {
					b.Fatal(err)
				}
				fence := New(t, Options{Timeout: time.Minute})
				allocation := results{}.device("node-7", "gpu-5")
				revision := nodes + 1
				b.ReportAllocs()
				for b.Loop() {
					revision++
					c := claim("new", revision, allocation)
					if err := t.Store().Update(c); err != nil {
						b.Fatal(err)
					}
					if fenced {
						if err := fence.Pass(b.Context(), []*resourceapi.ResourceClaim{c}, usage.View{}); err != nil {
							b.Fatal(err)
						}
					}
					revision++
					if err := t.Store().Update(claim("new", revision, nil)); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
