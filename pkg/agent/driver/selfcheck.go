// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/klog/v2"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/prepare"
)

const (
	// checkInterval is how often it is looked whether the sockets are ours, which costs two system calls.
	checkInterval = time.Second
	// callInterval is how often the agent calls itself as the kubelet would, and callTimeout how long it may take to answer.
	callInterval = 10 * time.Second
	callTimeout  = 5 * time.Second
	// writeInterval is how often it is tried to write, which a disk feels, and retryWriteInterval the same while the agent is not ready.
	// A folder that has not answered after folderTimeout does not answer.
	writeInterval      = time.Minute
	retryWriteInterval = 5 * time.Second
	folderTimeout      = 30 * time.Second
	// lasting is how long the agent must not have been ready until the devices are taken out. Who lost a socket is registered again sooner.
	lasting = 5 * time.Second

	// probeSize is that of a large record of the ledger.
	probeSize = 32 << 10
	// probeName is of no kind that somebody looks for in the folders.
	probeName = "write-probe" + durable.TempSuffix

	// selfHeader marks a call of the agent to itself, with the instance that it expects to answer.
	selfHeader = "stowage-node-agent-self"
)

// selfCheck looks, for as long as the agent serves, whether claims can be prepared on this node: is it this agent that the kubelet would
// call, can records be read and written? What the agent can mend itself it does.
type selfCheck struct {
	status   *Status
	instance string
	// registrar and endpoint are made by the plugin helper.
	registrar, endpoint *socket
	fsys                durable.FS
	folders             []string
	// needs are made where they are missing, and made is whether the folders have been: one that goes later has taken something with it.
	needs needs
	made  bool
	// readLedger reads all records. One that cannot be read is no error: it blocks its own GPUs.
	readLedger func() error
	// tell gets the problem once it has lasted, and nil when it is over.
	tell func(ctx context.Context, p *problem)
	// soon asks for a look at the folders now.
	soon chan struct{}

	// looked is when a look at the folders began last, and looking is closed at its end; nil if none is under way. again asks for another one.
	looked  time.Time
	looking <-chan struct{}
	again   bool
	// since is when the agent began not to be ready; zero if it is.
	since time.Time
	// told is the problem that has lasted; nil if there is none.
	told atomic.Pointer[problem]
}

// needs make what claims need.
type needs struct {
	folders func() error
	// empty makes folders that have nothing that is not made anew.
	empty func() error
	// programs brings along what containers are prepared with.
	programs func(context.Context) error
}

func newSelfCheck(opts Options, status *Status, needs needs, readLedger func() error, tell func(context.Context, *problem)) *selfCheck {
	c := &selfCheck{
		status: status, instance: string(uuid.NewUUID()), fsys: opts.FS,
		folders: []string{
			opts.StateDir, prepare.LedgerDir(opts.StateDir), prepare.QuarantineDir(opts.StateDir),
			prepare.LocksDir(opts.StateDir), opts.CDIDir,
		},
		needs: needs, readLedger: readLedger, tell: tell, soon: make(chan struct{}, 1),
	}
	if c.fsys == nil {
		c.fsys = durable.OS{}
	}
	return c
}

// run checks until ctx ends.
func (c *selfCheck) run(ctx context.Context) {
	ctx = klog.NewContext(ctx, klog.LoggerWithName(klog.FromContext(ctx), "selfcheck"))
	ticker := time.NewTicker(checkInterval)
	defer ticker.Stop()
	var called time.Time
	for ctx.Err() == nil {
		// 1. Are the sockets ours, and does this agent answer there?
		now := time.Now()
		if c.keepSockets(ctx) && now.Sub(called) >= callInterval {
			called = now
			c.callSelf(ctx)
		}
		// 2. Can records be read and written?
		c.look(ctx, now)
		// 3. What has lasted is told.
		if ctx.Err() == nil {
			c.tellWhatLasts(ctx, now)
		}
		select {
		case <-ctx.Done():
		case <-ticker.C:
		case <-c.soon:
			c.again = true
		}
	}
}

// begin tells at once why an agent that begins to serve is not ready: what it publishes first must not bring back the devices that an agent
// before has taken out. The kubelet is given the time to register the driver.
func (c *selfCheck) begin(ctx context.Context) {
	now := time.Now()
	if p := c.status.notReady(); p != nil && p.reason != reasonNotRegistered {
		c.since = now.Add(-lasting)
	}
	c.tellWhatLasts(ctx, now)
}

// tellWhatLasts tells a problem that has lasted, or that it is over. An agent that stops tells nothing any more: the kubelet's calls under
// way may take their time, while the one that follows is ready.
func (c *selfCheck) tellWhatLasts(ctx context.Context, now time.Time) {
	p := c.status.notReady()
	if c.status.ends() {
		return
	}
	switch {
	case p == nil:
		c.since = time.Time{}
	case c.since.IsZero():
		c.since = now
	}
	if (p == nil || now.Sub(c.since) >= lasting) && !p.same(c.told.Load()) {
		c.told.Store(p)
		c.tell(ctx, p)
	}
}

// look begins to look at the folders if that is due. One that does not answer holds up nothing else.
func (c *selfCheck) look(ctx context.Context, now time.Time) {
	select {
	case <-c.looking:
		c.looking = nil
	default:
	}
	interval := writeInterval
	if p := c.status.notReady(); p != nil {
		interval = retryWriteInterval
	}
	switch age := now.Sub(c.looked); {
	case c.looking == nil && (age >= interval || c.again):
		done := make(chan struct{})
		c.looked, c.looking, c.again = now, done, false
		go func() {
			defer close(done)
			c.checkFolders(ctx)
		}()
	case c.looking != nil && age > folderTimeout:
		since := c.looked.UTC().Format(time.RFC3339)
		c.fail(ctx, stageFolders, reasonFolderUnwritable, fmt.Errorf("the folders %v have not answered since %s", c.folders, since))
	}
}

// prepared looks at the folders at once if a claim could not be prepared because of them.
func (c *selfCheck) prepared(err error) {
	var failed *fs.PathError
	if err == nil || !errors.As(err, &failed) {
		return
	}
	select {
	case c.soon <- struct{}{}:
	default:
	}
}

// keepSockets makes a socket anew that is gone, and reports whether both are ours. The kubelet takes a new registration socket for a new
// plugin, and an old one that is gone for one that has ended.
func (c *selfCheck) keepSockets(ctx context.Context) (ours bool) {
	logger := klog.FromContext(ctx)
	var errs []error
	for _, s := range []*socket{c.endpoint, c.registrar} {
		renewed, err := s.keep(func() {
			// First: the kubelet may register the driver as soon as there is a socket.
			if s == c.registrar {
				c.status.fail(stageRegistered, reasonNotRegistered,
					"the kubelet has not registered the driver again since its registration socket was lost")
			}
		})
		if err != nil {
			errs = append(errs, err)
		}
		if renewed {
			socketsRenewed.Inc()
			logger.Info("A socket for the kubelet was gone and is made anew", "socket", s.path)
		}
	}
	if len(errs) == 0 {
		if _, why := c.status.get(stageServing); why.reason != reasonSocketSilent { // which only a call can tell
			c.status.set(stageServing, true)
		}
		return true
	}
	reason := reasonSocketMissing
	var bad *socketError
	if errors.As(errs[0], &bad) && bad.Err == nil {
		reason = reasonSocketTaken
		ctx = klog.NewContext(ctx, klog.LoggerWithValues(logger, "process", bad.PID))
	}
	c.fail(ctx, stageServing, reason, errs[0])
	return false
}

// callSelf calls both sockets by their paths, as the kubelet would, and looks who answers.
func (c *selfCheck) callSelf(ctx context.Context) {
	for _, s := range []*socket{c.endpoint, c.registrar} {
		if err := c.call(ctx, s); err != nil {
			if ctx.Err() == nil {
				silent := fmt.Sprintf("the agent does not answer on its own socket %s: ", s.path)
				if code := status.Code(err); code != codes.Unknown {
					_, was := c.status.get(stageServing)
					if was.reason == reasonSocketSilent && strings.HasPrefix(was.message, fmt.Sprintf("%srpc error: code = %s ", silent, code)) {
						return // told; how exactly a connection fails may differ each time
					}
				}
				c.fail(ctx, stageServing, reasonSocketSilent, fmt.Errorf("%s%w", silent, err))
			}
			return
		}
	}
	c.status.set(stageServing, true)
}

func (c *selfCheck) call(ctx context.Context, s *socket) (err error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+s.path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	ctx = metadata.AppendToOutgoingContext(ctx, selfHeader, c.instance)
	var header metadata.MD
	if s == c.registrar {
		_, err = registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{}, grpc.Header(&header))
	} else {
		_, err = drapb.NewDRAPluginClient(conn).NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{}, grpc.Header(&header))
	}
	if err != nil {
		return err
	}
	if got := header.Get(selfHeader); len(got) != 1 || got[0] != c.instance {
		return errors.New("somebody else answers")
	}
	return nil
}

// answer is the interceptor for calls of the agent to itself: they end here.
func (c *selfCheck) answer(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if len(metadata.ValueFromIncomingContext(ctx, selfHeader)) == 0 {
		return handler(ctx, request)
	}
	if err := grpc.SetHeader(ctx, metadata.Pairs(selfHeader, c.instance)); err != nil {
		return nil, err
	}
	if _, ok := request.(*registerapi.InfoRequest); ok {
		return &registerapi.PluginInfo{}, nil
	}
	return &drapb.NodePrepareResourcesResponse{}, nil
}

// checkFolders reads the ledger, tries to write where prepare has to, and brings along the programs that go there.
func (c *selfCheck) checkFolders(ctx context.Context) {
	if !c.haveFolders(ctx) {
		return
	}
	if err := c.needs.empty(); err != nil {
		c.fail(ctx, stageFolders, reasonOfFolder(err), fmt.Errorf("claims need a folder: %w", err))
		return
	}
	if err := c.readLedger(); err != nil {
		c.fail(ctx, stageLedger, reasonLedgerUnreadable, err)
	} else {
		c.status.set(stageLedger, true)
	}
	for _, folder := range c.folders {
		if err := c.write(folder); err != nil {
			c.fail(ctx, stageFolders, reasonOfFolder(err), fmt.Errorf("%s: %w", folderProblem(folder, err), err))
			return
		}
	}
	if err := c.needs.programs(ctx); err != nil {
		c.fail(ctx, stageFolders, reasonProgramMissing, fmt.Errorf("containers cannot be prepared: %w", err))
		return
	}
	c.status.set(stageFolders, true)
}

// haveFolders makes the folders at the start, or as soon as they can be made.
func (c *selfCheck) haveFolders(ctx context.Context) bool {
	if c.made {
		return true
	}
	if err := c.needs.folders(); err != nil {
		c.fail(ctx, stageFolders, reasonOfFolder(err), fmt.Errorf("%s: %w", folderProblem(c.folders[0], err), err))
		return false
	}
	c.made = true
	return true
}

// write does what writing a record needs, with a file that does not stay.
func (c *selfCheck) write(folder string) error {
	path := filepath.Join(folder, probeName)
	file, err := c.fsys.Create(path, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(make([]byte, probeSize))
	if err == nil {
		err = file.Sync()
	}
	removed := c.fsys.Remove(path)
	if errors.Is(removed, fs.ErrNotExist) { // another agent of the node has looked, too
		removed = nil
	}
	return errors.Join(err, file.Close(), removed)
}

func reasonOfFolder(err error) string {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return reasonFolderFull
	case errors.Is(err, unix.EROFS):
		return reasonFolderReadOnly
	}
	return reasonFolderUnwritable
}

func folderProblem(folder string, err error) string {
	switch reasonOfFolder(err) {
	case reasonFolderFull:
		return fmt.Sprintf("the folder %s is full", folder)
	case reasonFolderReadOnly:
		return fmt.Sprintf("the folder %s is read-only", folder)
	}
	return fmt.Sprintf("the folder %s cannot be written", folder)
}

// fail takes a stage back, and logs it when that is news.
func (c *selfCheck) fail(ctx context.Context, st stage, reason string, err error) {
	if _, was := c.status.get(st); was != (problem{reason, err.Error()}) {
		utilruntime.HandleErrorWithContext(ctx, err, "Claims cannot be prepared on this node", "reason", reason)
	}
	c.status.fail(st, reason, err.Error())
}

// same tells whether both are no problem, or the same.
func (p *problem) same(q *problem) bool {
	return p == nil && q == nil || p != nil && q != nil && *p == *q
}

// listenInto is how the plugin helper makes its sockets.
func listenInto(into **socket) func(context.Context, string) (net.Listener, error) {
	return func(_ context.Context, path string) (net.Listener, error) {
		s, err := listenOn(path)
		if err != nil {
			return nil, err
		}
		*into = s
		return s, nil
	}
}
