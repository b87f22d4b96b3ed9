// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// reconcileInterval bounds how long a CDI specification can be missing when no event tells of it, for example
// because the folder itself was replaced.
const reconcileInterval = 30 * time.Second

// keepCDI keeps the CDI specifications of prepared claims in the folder, by events and periodically, until
// ctx ends. The kubelet does not call Prepare when a container of a running pod restarts, so a file
// that was deleted would make the container fail for good.
func keepCDI(ctx context.Context, claims *prepare.Manager, dir string) {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "cdi"))
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		// Out of inotify instances: the periodic check remains.
		utilruntime.HandleErrorWithContext(ctx, err, "The CDI folder cannot be watched, it is only checked periodically", "folder", dir,
			"interval", reconcileInterval)
		watcher = &fsnotify.Watcher{}
	} else {
		defer watcher.Close()
		watchDir(ctx, watcher, dir)
	}
	ticker := time.NewTicker(reconcileInterval)
	defer ticker.Stop()
	// In the background: a claim that a call is at work on is waited for, and nobody else's file has to wait with it.
	var group sync.WaitGroup
	defer group.Wait()
	var failed failures
	all := func() { group.Go(func() { reconcileAll(ctx, claims, &failed) }) }
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-watcher.Events:
			if event.Name == dir && gone(event) {
				all()
				watchDir(ctx, watcher, dir)
				continue
			}
			group.Go(func() { restore(ctx, claims, event, &failed) })
		case err := <-watcher.Errors:
			// Events were lost: look at everything.
			utilruntime.HandleErrorWithContext(ctx, err, "Watch of the CDI folder", "folder", dir)
			all()
		case <-ticker.C:
			all()
			watchDir(ctx, watcher, dir)
		}
	}
}

// renewInterval is how often it is looked whether the driver is there, and at least between two tries; at most it is
// renewMaxInterval: a driver that is being loaded may answer before all of it is there.
const (
	renewInterval    = time.Second
	renewMaxInterval = 30 * time.Second
)

// renewClaims brings prepared claims in order after a start: the driver may have been loaded anew since an agent was there, or
// upgraded, and for pods that have run since before nobody calls Prepare. It tries on until that has succeeded for all, or ctx
// ends. Without a driver nobody is asked. Who has a device of a device plugin has no claim in the API.
func renewClaims(
	ctx context.Context, claims *prepare.Manager, hardware *Hardware, records func() ([]*ledger.Record, error), client kubernetes.Interface,
) {
	logger := klog.LoggerWithName(klog.FromContext(ctx), "renew")
	backoff := wait.Backoff{Duration: renewInterval, Factor: 2, Jitter: 0.1, Steps: 10, Cap: renewMaxInterval}
	var failed failures
	renewed := map[types.UID]bool{}
	all := func() bool {
		list, err := records()
		if err != nil {
			return false
		}
		left := false
		for _, record := range list {
			if record.Err != nil {
				left = true // who can use it is told elsewhere
			}
			if record.State() != ledger.PrepareCompleted || record.Entry.Claim.Namespace == "" || renewed[record.UID] {
				continue
			}
			of := record.Entry.Claim
			claim, err := client.ResourceV1().ResourceClaims(of.Namespace).Get(ctx, of.Name, metav1.GetOptions{})
			if err == nil && claim.UID == record.UID {
				err = claims.Renew(klog.NewContext(ctx, logger), claim)
			}
			if renewed[record.UID] = err == nil || apierrors.IsNotFound(err); !renewed[record.UID] {
				left = true
			}
			if failed.changed(string(record.UID), err) && !renewed[record.UID] && ctx.Err() == nil {
				logger.Info("A prepared claim cannot be brought in order with the driver that is loaded, trying on",
					"claim", klog.KRef(of.Namespace, of.Name), "reason", err)
			}
		}
		return !left
	}
	for ctx.Err() == nil {
		next := renewInterval
		if hardware.sessions.current() != nil {
			if all() {
				return
			}
			next = backoff.Step()
		}
		select {
		case <-ctx.Done():
		case <-time.After(next):
		}
	}
}

// gone tells whether a file, or a folder, is not what it was.
func gone(event fsnotify.Event) bool {
	return event.Has(fsnotify.Remove) || event.Has(fsnotify.Rename) || event.Has(fsnotify.Write)
}

func restore(ctx context.Context, claims *prepare.Manager, event fsnotify.Event, failed *failures) {
	if !gone(event) {
		return
	}
	uid, ours := cdi.ClaimOf(event.Name)
	if !ours {
		return
	}
	// Unprepare removes the file too: then the claim is gone from the ledger, or going, and its lock is waited for.
	if _, err := claims.RestoreClaim(ctx, uid); failed.changed(string(uid), err) && ctx.Err() == nil {
		utilruntime.HandleErrorWithContext(ctx, err, "CDI specification could not be restored", "claimUID", uid)
	}
}

func reconcileAll(ctx context.Context, claims *prepare.Manager, failed *failures) {
	if _, err := claims.Reconcile(ctx); failed.changed("", err) && ctx.Err() == nil {
		utilruntime.HandleErrorWithContext(ctx, err, "Claims could not be reconciled with the CDI folder")
	}
}

// watchDir watches the folder, again if it was replaced.
func watchDir(ctx context.Context, watcher *fsnotify.Watcher, dir string) {
	if watcher.Events == nil {
		return
	}
	if err := watcher.Add(dir); err != nil {
		klog.FromContext(ctx).Info("The CDI folder cannot be watched now, it is only checked periodically", "folder", dir, "reason", err.Error())
	}
}
