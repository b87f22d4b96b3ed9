// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/reconcile"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// Release takes a claim's devices back for an administrator, beside an agent that runs: with its locks, and on the proof by which the agent
// releases leftovers, which takes two looks a minute apart. With force neither is waited for. Who does not answer a look is waited for half
// a minute. The agent itself must not run.
func (a *Agent) Release(ctx context.Context, claim types.UID, force bool, say func(string)) (prepare.Released, error) {
	if err := a.claims.MakeFolders(); err != nil {
		return prepare.Released{}, err
	}
	if err := inTime(ctx, a.opts.Hardware.Look); err != nil {
		say(fmt.Sprintf("GPUs cannot be asked: %v", err))
	}
	// The kubelet makes its socket when it starts.
	if info, err := os.Stat(a.podResources()); err == nil {
		a.registered.Store(info.ModTime().UnixNano())
	}
	leftovers := a.newReconciler(ledger.At(durable.OS{}, prepare.LedgerDir(a.opts.StateDir)), a.ended)
	look := func(ctx context.Context) string {
		if a.opts.Client == nil {
			return "the API server cannot be asked, for want of --kubeconfig"
		}
		files, err := a.claims.Files()
		if err != nil {
			return err.Error()
		}
		var keep string
		err = inTime(ctx, func(ctx context.Context) (err error) {
			keep, err = leftovers.Look(ctx, claim, files)
			return err
		})
		if err != nil {
			return err.Error()
		}
		return keep
	}
	for keep := ""; !force; {
		if keep = look(ctx); keep != reconcile.LookedOnce && keep != reconcile.StartedRecently {
			break
		}
		say(fmt.Sprintf("nobody seems to use claim %s; looking again in %s, because %s", claim, reconcile.Interval, keep))
		select {
		case <-time.After(reconcile.Interval):
		case <-ctx.Done():
			return prepare.Released{}, context.Cause(ctx)
		}
	}
	return a.claims.Release(ctx, claim, force, look)
}

// inTime gives f half of the time between two looks: who hangs is a reason to keep the claim, and must not keep the administrator, nor one
// who uses force. The errors of a look tell who has not answered.
func inTime(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, reconcile.Interval/2)
	defer cancel()
	return f(ctx)
}

// ended tells whether no process of the pod is left. It is not known where the kubelet cannot be seen, as
// then its pods' processes cannot be, either.
func (a *Agent) ended(ctx context.Context, pod *corev1.Pod) bool {
	if seesPeer(ctx, a.podResources()) != nil {
		return false
	}
	running, err := sharing.PodsRunning("/proc")
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Processes cannot be listed", "reason", err.Error())
		return false
	}
	return !running[pod.UID]
}

// running returns the source of the pods that have processes; nil where these are not those of the GPUs.
func (a *Agent) running() func(context.Context) (map[types.UID]bool, error) {
	if a.opts.Tools.Pods == nil {
		return nil
	}
	return func(ctx context.Context) (map[types.UID]bool, error) {
		if err := seesPeer(ctx, a.podResources()); err != nil {
			return nil, err
		}
		return a.opts.Tools.Pods()
	}
}

// podResources is the kubelet's socket that tells what its pods have.
func (a *Agent) podResources() string {
	return filepath.Join(a.opts.KubeletRoot, "pod-resources", "kubelet.sock")
}

// seesPeer returns an error if it is not certain that who listens at the socket is in the process table.
func seesPeer(ctx context.Context, socket string) error {
	// A kubelet that hangs takes no connections.
	ctx, cancel := context.WithTimeout(ctx, peerTimeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var peerErr error
	if err := raw.Control(func(fd uintptr) { peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return err
	}
	if peerErr == nil && peer.Pid <= 0 {
		return errors.New("the kubelet's process cannot be seen: the agent's pod needs hostPID")
	}
	return peerErr
}

const peerTimeout = 5 * time.Second
