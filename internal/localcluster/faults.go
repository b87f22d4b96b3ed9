// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Names of what envtest runs, as in plane.pids.
const (
	etcdName      = "etcd"
	apiServerName = "kube-apiserver"
)

// EtcdURL is where etcd serves clients, without authentication.
func (c *Cluster) EtcdURL() string { return c.plane.envtest.Etcd.URL.String() }

// PauseEtcd stops etcd where it is, as a disk that hangs would: connections stay
// open and nothing is answered. ResumeEtcd lets it go on.
func (c *Cluster) PauseEtcd() error { return c.plane.signalOne(etcdName, syscall.SIGSTOP) }

// ResumeEtcd ends what PauseEtcd began. An etcd that is not paused goes on as it
// is.
func (c *Cluster) ResumeEtcd() error { return c.plane.signalOne(etcdName, syscall.SIGCONT) }

// CrashAPIServer kills kube-apiserver with SIGKILL, starts it again at the same
// address with the same certificates and keys, and waits until it is healthy.
// Tokens and kubeconfigs stay valid.
func (c *Cluster) CrashAPIServer(ctx context.Context) error {
	if err := c.plane.crashAPIServer(ctx); err != nil {
		return fmt.Errorf("crashing kube-apiserver: %w", err)
	}
	return nil
}

func (p *plane) crashAPIServer(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return ErrStopped
	}
	pid, err := p.pidFile(apiServerName)
	if err != nil {
		return err
	}
	if err := p.signalOne(apiServerName, syscall.SIGKILL); err != nil {
		return err
	}
	err = wait.PollUntilContextTimeout(ctx, readyInterval, DefaultStopTimeout, true,
		func(context.Context) (bool, error) { return !pid.alive(), nil })
	if err != nil {
		return fmt.Errorf("waiting for its end: %w", err)
	}
	// Start knows no context; without its process it returns.
	detach := context.AfterFunc(ctx, func() { _ = p.signalOne(apiServerName, syscall.SIGKILL) })
	defer detach()
	onSpawnThread(func() { err = p.envtest.APIServer.Start() })
	if err != nil {
		return fmt.Errorf("starting it again: %w; log %s ends with:\n%s", err, pid.log, LogTail(pid.log))
	}
	return ctx.Err()
}

func (p *plane) pidFile(name string) (pidFile, error) {
	for _, f := range p.pids {
		if f.name == name {
			return f, nil
		}
	}
	return pidFile{}, fmt.Errorf("%s has not been prepared", name)
}

// signalOne sends a signal to one of the two processes.
func (p *plane) signalOne(name string, sig syscall.Signal) error {
	f, err := p.pidFile(name)
	if err != nil {
		return err
	}
	if !f.alive() {
		return fmt.Errorf("sending %s to %s: %w", sig, name, errNotRunning)
	}
	if err := syscall.Kill(f.read(), sig); err != nil {
		return fmt.Errorf("sending %s to %s: %w", sig, name, err)
	}
	return nil
}

var errNotRunning = errors.New("it is not running")

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
