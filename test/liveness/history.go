// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/test/chaos/audit"
	"stowage.dev/stowage/test/liveness/memoryapi"
)

const (
	// quiet is longer than any pause after which something is tried again: backoff, the fence's wait, a woken pod that
	// was not tried, a write that comes late; and than any pod's grace but the long one.
	quiet = 45 * time.Second
	// patience is how long a cluster may take to come to rest, beyond that.
	patience = 10 * time.Minute
	// adoptionLasts is how long a scheduler believes a note that one before it is binding a pod: a minute after the longest binding.
	adoptionLasts = time.Minute + config.DefaultBindingTimeout
	// permitTimeout is how long a pod of a gang waits for the others before it gives up, and a little more.
	permitTimeout = 5*time.Minute + 10*time.Second
	// stormOf is a number of attempts, all at once, that nothing explains.
	stormOf = 300
	// secondLook is what the new scheduler gets.
	secondLook = 12 * time.Second
)

// history is a scenario while it is played.
type history struct {
	ctx         context.Context
	api         *memoryapi.Server
	user        kubernetes.Interface
	scenario    Scenario
	controllers *controllers
	scheduler   *scheduler
	started     int   // schedulers
	err         error // why it could not be played

	mutex  sync.Mutex
	writes []memoryapi.Write // of the present scheduler
	moved  time.Time         // when something was written or a pod tried
	// groups is what has been done for groups up to when one was tried the last time, but for refusals.
	groups groupWork
	// nominations are the nodes that pods are nominated to, as the last write to each showed.
	nominations map[types.UID]string
	faults      []Fail
	dead        map[string]bool // schedulers of which nothing reaches the API any more
	killedAt    time.Time       // the last one
	// requests are the writes that schedulers have tried until trouble ended, undoing how many of them before it began: before the first
	// request of the scenario failed, or the step [Undo].
	requests []request
	undoing  int
	calm     bool  // trouble has ended
	unmet    []int // which of the steps [Fail] had not had all failed by then that they want
	// over says at every write whether bound pods have more devices than there are.
	over       *audit.History
	violations []string
	instant    time.Time // of the last attempt, and how many others there were then
	tries      int
	attempts   int64          // of the scheduler that came to rest
	bound      []string       // pods, as they were bound
	evicted    []string       // pods
	counts     map[string]int // what has happened, by kind
	// excused: it was not asked what a new scheduler does, see waitsForADeletion.
	excused bool
}

// Run plays a scenario and returns what is wrong, in the end or on the way.
func Run(t *testing.T, scenario Scenario, logger klog.Logger) []string {
	_, differences := run(t, scenario, logger)
	return differences
}

func run(t *testing.T, scenario Scenario, logger klog.Logger) (h *history, differences []string) {
	prepareProcess()
	if err := switchGroups(scenario.Groups); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(*testing.T) {
		ctx, cancel := context.WithCancel(klog.NewContext(context.Background(), logger))
		h = &history{ctx: ctx, scenario: scenario, api: memoryapi.New(), dead: map[string]bool{}, counts: map[string]int{}}
		h.user = h.api.Client("user")
		differences = h.play()
		cancel()
		time.Sleep(h.quiet()) // nobody waits any more for an attempt that a storm has put off, nor for the others of a gang
		synctest.Wait()
	})
	return h, differences
}

// request is a kind of request.
type request struct{ verb, what string }

// play is the way of a history.
func (h *history) play() []string {
	// 1. The cluster, and who else acts in it.
	h.makeCluster()
	h.api.OnWrite(h.note)
	h.api.SetFaults(h.fault)
	h.controllers = startControllers(h.ctx, h.api, h.scenario.Groups)
	defer func() { h.controllers.stop() }()
	// 2. The scheduler, and what happens.
	h.start()
	for _, step := range h.scenario.Steps {
		if h.scheduler == nil {
			break // h.err says why
		}
		h.count(reflect.TypeOf(step).Name())
		step.do(h)
	}
	// 3. Rest.
	h.endTrouble()
	restless := h.awaitRest()
	h.attempts = h.scheduler.attempts.Load()
	nominated := h.nominated()
	h.stop()
	h.show(nominated)
	if h.err = errors.Join(h.err, h.api.Problems()); h.err != nil {
		return []string{"the history cannot be played: " + h.err.Error()}
	}
	if restless != "" {
		return []string{restless}
	}
	// 4. What may not be at rest.
	differences := append(h.violations, h.judgeRest()...)
	if h.excused = h.waitsForADeletion(); h.excused {
		return differences
	}
	// 5. What a new scheduler does, and one that does not believe what the old one believed.
	atRest, waits := h.api.Clone(), h.waitsInVain()
	differences = append(differences, h.judgeSuccessor(atRest)...)
	return append(differences, h.judgeNominations(atRest, waits)...)
}

// quiet is how long nothing happens before it counts as rest.
func (h *history) quiet() time.Duration {
	if h.scenario.Groups {
		return quiet + permitTimeout
	}
	return quiet
}

// awaitRest waits until nothing has been written and no pod been tried for a while. Groups are tried by time, but not often.
func (h *history) awaitRest() (restless string) {
	begin := time.Now()
	attempts := h.scheduler.attempts.Load()
	var before *groupWork // what had been done for groups by the last minute
	for time.Since(begin) < patience+h.quiet() {
		h.sleep(time.Second)
		synctest.Wait()
		h.mutex.Lock()
		idle := time.Since(h.moved)
		h.mutex.Unlock()
		if idle >= h.quiet() && h.mayBeBound() {
			begin, before = begin.Add(time.Second), nil // nothing moves, and that is no unrest
			continue
		}
		switch {
		case !h.scenario.Groups:
			if idle >= h.quiet() {
				return ""
			}
		case idle < h.quiet()-time.Minute:
			before = nil
		case before == nil:
			before = h.groupWork()
		case idle >= h.quiet() && time.Since(before.at) >= time.Minute:
			return h.judgeGroupWork(before)
		}
	}
	return fmt.Sprintf("no rest: after %s pods are still tried or written to, %d attempts", patience, h.scheduler.attempts.Load()-attempts)
}

// mayBeBound tells whether a pod waits of which a note says that a scheduler before is binding it. It keeps its devices as long as
// that is believed. The reservation of a group has one note, for all its pods.
func (h *history) mayBeBound() bool {
	pods, err := h.user.CoreV1().Pods("").List(h.ctx, metav1.ListOptions{})
	h.err = errors.Join(h.err, err)
	claims, err := h.user.ResourceV1().ResourceClaims("").List(h.ctx, metav1.ListOptions{})
	h.err = errors.Join(h.err, err)
	if h.err != nil {
		return false
	}
	return slices.ContainsFunc(claims.Items, func(claim resourceapi.ResourceClaim) bool {
		return slices.ContainsFunc(claim.Status.ReservedFor, func(user resourceapi.ResourceClaimConsumerReference) bool {
			_, since, _ := strings.Cut(claim.Annotations["adopted.stowage.dev/"+string(user.UID)], " ")
			at, err := time.Parse(time.RFC3339Nano, since)
			return err == nil && time.Since(at) < adoptionLasts && slices.ContainsFunc(pods.Items, func(pod v1.Pod) bool {
				return pod.Spec.NodeName == "" && pod.Namespace == claim.Namespace && isFor(user, &pod)
			})
		})
	})
}

// isFor tells whether something is reserved for a pod of the same namespace, or for its group.
func isFor(user resourceapi.ResourceClaimConsumerReference, pod *v1.Pod) bool {
	if user.Resource == "podgroups" {
		return pod.Spec.SchedulingGroup != nil && *pod.Spec.SchedulingGroup.PodGroupName == user.Name
	}
	return user.UID == pod.UID
}

// sleep lets time pass. A second after a scheduler has been killed, another one follows.
func (h *history) sleep(d time.Duration) {
	for d > 0 {
		step := min(d, time.Second)
		if killed, at := h.killed(); killed {
			step = min(d, time.Until(at.Add(time.Second)))
		}
		time.Sleep(step)
		d -= step
		if killed, at := h.killed(); killed && time.Since(at) >= time.Second {
			h.stop()
			h.start()
		}
	}
}

// killed tells whether the present scheduler has been killed, and when.
func (h *history) killed() (killed bool, at time.Time) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	return h.scheduler != nil && h.dead[h.scheduler.name], h.killedAt
}

// start starts a scheduler, by a name of its own.
func (h *history) start() {
	h.mutex.Lock()
	h.started++ // undoing of the scheduler before may still write
	h.writes = nil
	h.mutex.Unlock()
	scheduler, err := startScheduler(h.ctx, fmt.Sprintf("scheduler-%d", h.started), h.api, h.scenario, h.tried)
	if err != nil {
		h.err = err
	}
	h.mutex.Lock()
	defer h.mutex.Unlock()
	h.scheduler = scheduler // only here, so that the player of the steps reads it without the lock
}

func (h *history) stop() {
	if h.scheduler == nil {
		return
	}
	h.scheduler.stop()
	// Its process ends. The pods of a gang that wait for others do not know that.
	name := h.scheduler.name
	after(h.ctx, time.Minute, func() {
		h.mutex.Lock()
		defer h.mutex.Unlock()
		h.dead[name] = true
	})
}

// endTrouble lets all informers hear everything, and all requests be answered.
func (h *history) endTrouble() {
	for _, resource := range resources {
		h.api.Release(resource)
	}
	h.mutex.Lock()
	defer h.mutex.Unlock()
	for i, f := range h.faults {
		if f.Times > 0 {
			h.unmet = append(h.unmet, i)
		}
	}
	h.faults, h.calm = nil, true
}

func (h *history) count(what string) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	h.counts[what]++
}

// note is told of every write.
func (h *history) note(w memoryapi.Write) {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	change := audit.Change{Deleted: w.Deleted}
	change.Pod, _ = w.Object.(*v1.Pod)
	change.Claim, _ = w.Object.(*resourceapi.ResourceClaim)
	change.Group, _ = w.Object.(*schedulingapi.PodGroup)
	if renominated := h.isRenominated(change.Pod); renominated || !isGroupCondition(w) {
		h.moved = time.Now()
	}
	if change.Pod != nil || change.Claim != nil || change.Group != nil {
		for _, violation := range h.over.Apply(w.Version, time.Now(), change) {
			h.violations = append(h.violations, violation.What)
		}
	}
	if w.Client == fmt.Sprintf("scheduler-%d", h.started) {
		h.writes = append(h.writes, w)
	}
	switch name := w.Object.(metav1.Object).GetName(); {
	case w.What == "pods/binding":
		h.counts["bound"]++
		if change.Pod.Spec.SchedulingGroup != nil {
			h.counts["bound in a group"]++
		}
		h.bound = append(h.bound, name)
	case w.Client == attacherName:
		h.counts["device attached, or not"]++
	case w.What == "pods" && w.Verb == "delete" && strings.HasPrefix(w.Client, "scheduler"):
		if change.Pod.Labels[guarded] != "" {
			h.counts["guarded pod evicted"]++
		}
		h.evicted = append(h.evicted, name)
	}
}

// isGroupCondition tells whether a write says why a group waits, or a pod of it. That depends on the node at which kube-scheduler begins,
// so it changes as often as the group is tried, and is as little unrest.
func isGroupCondition(w memoryapi.Write) bool {
	if !strings.HasPrefix(w.Client, "scheduler") {
		return false
	}
	pod, _ := w.Object.(*v1.Pod)
	return w.What == "podgroups/status" || w.What == "pods/status" && pod.Spec.SchedulingGroup != nil
}

// isRenominated tells whether a pod is nominated to another node than it was at the last write to it, or to none any more. No pod
// is, at rest, also none of a group that is tried again and again.
func (h *history) isRenominated(pod *v1.Pod) bool {
	if pod == nil {
		return false
	}
	before := h.nominations[pod.UID]
	if h.nominations == nil {
		h.nominations = map[types.UID]string{}
	}
	h.nominations[pod.UID] = pod.Status.NominatedNodeName
	return before != pod.Status.NominatedNodeName
}

// tried is told of every scheduling attempt. A pod that is tried again and again at one instant is a storm: time, which
// passes only when everybody waits, would stand still for ever. A group that does not fit is tried again and again, as upstream does: that
// is no unrest.
func (h *history) tried(group bool) {
	h.mutex.Lock()
	if now := time.Now(); now.Equal(h.instant) {
		h.tries++
	} else {
		h.instant, h.tries = now, 0
	}
	if group {
		h.groups.at = h.instant
		h.groups.tries++
	} else {
		h.moved = h.instant
	}
	storm := h.tries >= stormOf
	if h.tries == stormOf {
		h.violations = append(h.violations, fmt.Sprintf("storm: %d attempts at one instant", stormOf))
	}
	h.mutex.Unlock()
	if storm {
		time.Sleep(time.Second)
	}
}

// fault has the requests of schedulers fail as steps want it.
func (h *history) fault(client, verb, what string) memoryapi.Fault {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	if client == "user" || client == controllerName || client == attacherName {
		return memoryapi.None
	}
	if h.dead[client] {
		return memoryapi.Lost
	}
	if verb != "get" && !h.calm {
		h.requests = append(h.requests, request{verb, what})
	}
	for i := range h.faults {
		f := &h.faults[i]
		if f.Verb != verb || f.What != what {
			continue
		}
		if f.After > 0 {
			f.After--
			continue
		}
		if f.Times > 0 {
			f.Times--
			h.beginUndoing()
			switch f.Kill {
			case Before:
				h.kill(client)
			case After:
				after(h.ctx, 50*time.Millisecond, func() {
					h.mutex.Lock()
					defer h.mutex.Unlock()
					h.kill(client)
				})
			case Never:
			}
			return f.With
		}
	}
	return memoryapi.None
}

// beginUndoing notes that the next requests undo something, if none before did.
func (h *history) beginUndoing() {
	if h.undoing == 0 {
		h.undoing = len(h.requests)
	}
}

// kill lets nothing of a scheduler reach the API any more, and ends it.
func (h *history) kill(client string) {
	h.counts["scheduler killed"]++
	h.dead[client] = true
	h.killedAt = time.Now()
	if h.scheduler != nil && h.scheduler.name == client {
		h.scheduler.cancel()
	}
}

// describe says what a write does to others, "" if it only tells of the scheduler's view.
func describe(w memoryapi.Write) string {
	name := w.Object.(metav1.Object).GetName()
	switch object := w.Object.(type) {
	case *v1.Pod:
		switch {
		case w.What == "pods/binding":
			return fmt.Sprintf("binds pod %s to %s", name, object.Spec.NodeName)
		case w.Verb == "delete":
			return "evicts pod " + name
		}
	case *resourceapi.ResourceClaim:
		switch {
		case w.Verb == "delete":
			return "deletes claim " + name
		case w.What == "resourceclaims/status" && object.Status.Allocation == nil:
			return "deallocates claim " + name
		case w.What == "resourceclaims/status":
			return "allocates or reserves claim " + name
		}
	}
	return ""
}

func (h *history) makeCluster() {
	h.made(h.user.CoreV1().Namespaces().Create(h.ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}))
	var all []*resourceapi.ResourceSlice
	if !h.scenario.LateClasses {
		for _, name := range classNames {
			Class{Name: name}.do(h)
		}
	}
	for _, node := range h.scenario.Nodes {
		all = append(all, node.slices()...)
		if !node.Late {
			h.join(node)
			h.publish(node)
		}
	}
	if !slices.ContainsFunc(h.scenario.Nodes, func(n Node) bool { return !n.Late }) {
		h.join(Node{Name: "bare"}) // without any node, kube-scheduler tries again and again
	}
	h.over = audit.NewHistory(audit.NewInventory(all))
}
