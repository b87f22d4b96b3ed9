package prepare

import (
	"context"
	"fmt"
	"hash/fnv"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
)

// claimShards is the number of lock files for claims. Claims come and go and a lock file cannot be removed
// safely, so claims share a fixed number of them; two claims that meet in one only wait for each other.
const claimShards = 256

// locker takes file locks in one folder, which exclude other agents as well as other calls to this one.
type locker struct {
	dir     string
	timeout time.Duration
}

// lockClaim excludes every other call for the same claim.
func (l *locker) lockClaim(ctx context.Context, uid types.UID) (unlock func(), err error) {
	hash := fnv.New32a()
	hash.Write([]byte(uid))
	return l.lock(ctx, "claim", fmt.Sprintf("%02x", hash.Sum32()%claimShards))
}

// lockGPUs excludes every other call that holds or may come to hold one of the GPUs. The global order is
// the claim's lock first, then GPUs by name: no two callers can wait for each other.
func (l *locker) lockGPUs(ctx context.Context, gpus []string) (unlock func(), err error) {
	var unlocks []func()
	unlock = func() {
		for _, u := range slices.Backward(unlocks) {
			u()
		}
	}
	for _, gpu := range slices.Compact(slices.Sorted(slices.Values(gpus))) {
		u, err := l.lock(ctx, "gpu", gpu)
		if err != nil {
			unlock()
			return nil, err
		}
		unlocks = append(unlocks, u)
	}
	return unlock, nil
}

// lock takes the lock of that kind and name, and measures how long that took, with or without success.
func (l *locker) lock(ctx context.Context, kind, name string) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	start := time.Now()
	defer func() { lockWaitSeconds.WithLabelValues(kind, outcome(err)).Observe(time.Since(start).Seconds()) }()
	return durable.Lock(ctx, filepath.Join(l.dir, kind+"-"+name+".lock"))
}
