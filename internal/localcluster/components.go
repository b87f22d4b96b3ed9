package localcluster

import (
	"context"
	"errors"
	"time"
)

// componentInterval is how often etcd and kube-apiserver, which are no children that could be waited for, are looked at.
const componentInterval = time.Second

// WatchPlane tells of etcd and of kube-apiserver, once each, when it has ended although nobody asked it to, until ctx ends. Processes that
// the cluster has started itself are told of by the progress writer.
func WatchPlane(ctx context.Context, c *Cluster, tell func(*ExitError)) {
	told := map[string]bool{}
	ticker := time.NewTicker(componentInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, pid := range c.plane.pids {
			if pid.read() != 0 && !pid.alive() && !told[pid.name] && ctx.Err() == nil {
				told[pid.name] = true
				tell(&ExitError{Name: pid.name, Err: errors.New("exit status unknown"), LogFile: pid.log, LogTail: LogTail(pid.log)})
			}
		}
	}
}
