// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	resourcelisters "k8s.io/client-go/listers/resource/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

// Bounds of what a keeper does. Somebody who deletes the rule time and again, a deployment tool for example, is
// followed at this pace.
const (
	writesPerSecond = 1
	burst           = 5
	minRetry        = 100 * time.Millisecond
	maxRetry        = 30 * time.Second
)

// errForeign says that an object of somebody else has the name of a rule of ours.
var errForeign = errors.New("it has neither our label nor our taint, so it belongs to somebody else")

// Keeper makes the rules of the process's profiles what they should be, and keeps them so.
type Keeper struct {
	client   resourceclient.DeviceTaintRulesGetter
	informer cache.SharedIndexInformer
	lister   resourcelisters.DeviceTaintRuleLister
	queue    workqueue.TypedRateLimitingInterface[string] // of rule names
	limiter  flowcontrol.RateLimiter

	mu    sync.Mutex
	wants map[string]*resourceapi.DeviceTaintRule // rule name → rule; nil if there must be none
}

// NewKeeper returns a keeper that does nothing before Run. The caller starts the informer's factory later. The end of
// ctx ends what the keeper has in the background, also if it never runs.
func NewKeeper(ctx context.Context, client resourceclient.DeviceTaintRulesGetter,
	rules resourceinformers.TypedDeviceTaintRuleInformer,
) *Keeper {
	registerMetrics()
	k := &Keeper{
		client:   client,
		informer: rules.Informer(),
		lister:   rules.Lister(),
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[string](minRetry, maxRetry),
			workqueue.TypedRateLimitingQueueConfig[string]{Name: "ownership"}),
		limiter: flowcontrol.NewTokenBucketRateLimiter(writesPerSecond, burst),
		wants:   map[string]*resourceapi.DeviceTaintRule{},
	}
	context.AfterFunc(ctx, k.queue.ShutDown)
	return k
}

// Want says what the rule with the name has to look like, or, with nil, that there must be none.
func (k *Keeper) Want(name string, rule *resourceapi.DeviceTaintRule) {
	k.mu.Lock()
	k.wants[name] = rule
	k.mu.Unlock()
	k.queue.Add(name)
}

// wanted returns what Want said about the name.
func (k *Keeper) wanted(name string) (rule *resourceapi.DeviceTaintRule, known bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	rule, known = k.wants[name]
	return rule, known
}

// Run keeps the rules until ctx ends, which is the keeper's or one that ends earlier. The rules stay when it ends: another replica
// takes over, or the same scheduler comes back.
func (k *Keeper) Run(ctx context.Context) {
	logger := klog.FromContext(ctx)
	handler, err := k.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    k.changed,
		UpdateFunc: func(_, object any) { k.changed(object) },
		DeleteFunc: k.changed,
	})
	if err != nil {
		logger.Error(err, "Cannot watch DeviceTaintRules, ownership of devices is not kept")
		return
	}
	defer func() {
		if err := k.informer.RemoveEventHandler(handler); err != nil {
			logger.Error(err, "Cannot stop watching DeviceTaintRules")
		}
	}()
	stop := context.AfterFunc(ctx, k.queue.ShutDown)
	defer stop()
	if !cache.WaitForCacheSync(ctx.Done(), handler.HasSynced) {
		return
	}
	for {
		name, shutdown := k.queue.Get()
		if shutdown {
			return
		}
		if err := k.keep(ctx, name); err == nil {
			k.queue.Forget(name)
		} else {
			if ctx.Err() == nil && !apierrors.IsConflict(err) { // which the next try does not have
				logger.Error(err, "Cannot keep the DeviceTaintRule that keeps other schedulers off our devices", "deviceTaintRule", name)
			}
			k.queue.AddRateLimited(name)
		}
		k.queue.Done(name)
	}
}

// changed looks at a rule again whose name is known.
func (k *Keeper) changed(object any) {
	name, err := cache.DeletionHandlingMetaNamespaceKeyFunc(object)
	if err != nil {
		return // not an object
	}
	if _, known := k.wanted(name); known {
		k.queue.Add(name)
	}
}

// keep compares what there is with what is wanted, and writes at most once.
func (k *Keeper) keep(ctx context.Context, name string) error {
	want, _ := k.wanted(name)
	have, err := k.lister.Get(name)
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("look up DeviceTaintRule %s: %w", name, err)
	}
	exists := err == nil
	switch {
	case exists && have.DeletionTimestamp != nil, !exists && want == nil:
		return nil // an event tells when it is gone; or it is as it should be
	case !exists:
		return k.write(ctx, "create", func(rules resourceclient.DeviceTaintRuleInterface) error {
			_, err := rules.Create(ctx, want, metav1.CreateOptions{})
			return err
		})
	case !isOurs(have):
		if want == nil {
			return nil
		}
		return fmt.Errorf("take DeviceTaintRule %s: %w", name, errForeign)
	case want == nil:
		return k.write(ctx, "delete", func(rules resourceclient.DeviceTaintRuleInterface) error {
			err := rules.Delete(ctx, name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(have.UID))})
			if apierrors.IsNotFound(err) {
				return nil
			}
			return err
		})
	}
	fixed := repaired(have, want)
	if fixed == nil {
		return nil
	}
	return k.write(ctx, "update", func(rules resourceclient.DeviceTaintRuleInterface) error {
		_, err := rules.Update(ctx, fixed, metav1.UpdateOptions{}) // fails if it has changed meanwhile
		return err
	})
}

// write does one write, at the keeper's pace, and counts and logs it.
func (k *Keeper) write(ctx context.Context, what string, do func(resourceclient.DeviceTaintRuleInterface) error) error {
	if err := k.limiter.Wait(ctx); err != nil {
		return err
	}
	err := do(k.client.DeviceTaintRules())
	countWrite(what, err)
	if err != nil {
		return fmt.Errorf("%s DeviceTaintRule: %w", what, err)
	}
	klog.FromContext(ctx).V(2).Info("Changed the DeviceTaintRule that keeps other schedulers off our devices", "write", what)
	return nil
}
