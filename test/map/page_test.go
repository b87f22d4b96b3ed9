// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package maptest

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// file writes a cluster as a snapshot.
func file(t *testing.T, c *snapshottest.Cluster) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "cluster.json")
	out, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Snapshot().Write(out), out.Close()); err != nil {
		t.Fatal(err)
	}
	return name
}

// The browser that the command opens has a code on its command line, and signs in with it; nobody does after it.
func TestTheOpenedBrowserSignsIn(t *testing.T) {
	browser := newBrowser(t)
	dir := t.TempDir()
	opened := filepath.Join(dir, "opened")
	if err := errors.Join(syscall.Mkfifo(opened, 0o600),
		os.WriteFile(filepath.Join(dir, "xdg-open"), []byte("#!/bin/sh\nprintf %s \"$1\" >\"${0%/*}/opened\"\n"), 0o700)); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Setenv("DISPLAY", ":99")
	s := serve(t, "--open=true", "--snapshot", file(t, snapshottest.New(3, 2)))
	address, err := os.ReadFile(opened)
	if err != nil || strings.Contains(string(address), s.token) || !strings.HasPrefix(string(address), s.origin+"/#code=") {
		t.Fatalf("%v: it opens %s", err, address)
	}
	tab := browser.tab(chromedp.Navigate(string(address)))
	tab.waitFor(`document.querySelectorAll('.card').length === 3`)
	if left := eval[string](tab, `location.href`); left != s.origin+"/" {
		t.Errorf("the address is %s", left)
	}
	second := browser.tab()
	second.expectsErrors.Store(true)
	second.run(chromedp.Navigate(string(address)))
	second.waitFor(`document.body.innerText.includes('the code was used already')`)
}

// varied is a cluster with GPUs in all states.
func varied(nodes int) *snapshottest.Cluster {
	c := snapshottest.New(nodes, 8)
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	for i := range nodes {
		devices := &c.ResourceSlices[i].Spec.Devices
		switch i % 5 {
		case 0:
			for g := range 8 {
				c.Run(fmt.Sprintf("team-%c", 'a'+i%3), fmt.Sprintf("train-%d-%d", i, g), 0, i, g)
			}
		case 1:
			c.Run("team-a", fmt.Sprintf("llm-%d", i), 0, i, 0, 1, 2, 3)
			c.Taint(i, 5, "gpu.nvidia.com/xid")
			c.Taint(i, 1, "gpu.nvidia.com/slow")
		case 2:
			for g := range 2 {
				for k, profile := range []string{"3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"} {
					*devices = append(*devices, resourceapi.Device{
						Name: fmt.Sprintf("gpu-%d-mig-%d", g, k),
						Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
							"type": text("mig"), "parentUUID": (*devices)[g].Attributes["uuid"], "profile": text(profile),
							"productName": text("NVIDIA H100 80GB HBM3"),
						},
					})
				}
			}
			for k, name := range []string{"gpu-0-mig-0", "gpu-0-mig-2", "gpu-1-mig-1", "gpu-1-mig-2", "gpu-1-mig-3"} {
				_, claim := c.Run("team-b", fmt.Sprintf("infer-%d-%d", i, k), 0, i, 0)
				claim.Status.Allocation.Devices.Results[0].Device = name
			}
			for g := 3; g < 5; g++ {
				(*devices)[g].AllowMultipleAllocations = ptr.To(true)
				for k, memory := range []string{"20Gi", "10Gi", "30Gi"}[:g-1] {
					_, claim := c.Run("team-c", fmt.Sprintf("notebook-%d-%d-%d", i, g, k), 0, i, g)
					claim.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{
						"memory": resource.MustParse(memory),
					}
				}
			}
		case 3:
			for g := 4; g < 8; g++ {
				(*devices)[g].Attributes["nvlinkDomain"] = text("second")
			}
			c.Run("team-b", fmt.Sprintf("job-%d", i), 0, i, 4, 5)
			if i == 3 {
				c.Run("team-b", "left-behind", 0, i, 9)
			}
		case 4:
			c.Run("team-c", fmt.Sprintf("eval-%d", i), 0, i, 0)
			if i == 9 {
				c.ResourceSlices[i].Spec.Pool.ResourceSliceCount = 2
			}
		}
	}
	late, _ := c.Pod("team-a", "llm-next", 8, 10)
	late.Status.Conditions = []v1.PodCondition{{
		Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: v1.PodReasonUnschedulable,
		Message: "0/40 nodes are available: 40 node(s) whose matching devices are held by other claims",
	}}
	c.Pod("team-b", "batch-17", 12, 0)
	c.Pod("team-c", "notebook", 1, 0)
	return c
}

// All names are text, whatever they are.
func TestNamesDoNotInject(t *testing.T) {
	const evil = `"><img src=x onerror="window.evil=1"><script>window.evil=1</script><b>`
	c := snapshottest.New(2, 2)
	text := evil + "\u202e\u0000"
	for i := range 2 {
		device := &c.ResourceSlices[i].Spec.Devices[0]
		device.Name = evil
		device.Attributes["productName"] = resourceapi.DeviceAttribute{StringValue: &text}
		device.Attributes["nvlinkDomain"] = resourceapi.DeviceAttribute{StringValue: &text}
		device.Taints = []resourceapi.DeviceTaint{{Key: evil, Value: evil, Effect: evil}}
	}
	_, claim := c.Run(evil, evil, 0, 0, 1)
	claim.Status.Allocation.Devices.Results[0].Device = evil
	pod, _ := c.Pod(evil, "waits"+evil, 1, 0)
	pod.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse, Message: evil}}
	name := evil + "node"
	c.ResourceSlices[1].Spec.NodeName = &name

	s := serve(t, "--snapshot", file(t, c))
	tab := newBrowser(t).tab(chromedp.Navigate(s.page))
	tab.waitFor(`document.querySelectorAll('.card').length === 2`)
	eval[bool](tab, `document.querySelector('.grid .gpu').click(), document.querySelector('.why').click(), true`)
	tab.waitFor(`document.querySelector('.pinned') && document.querySelector('.answer p:not(.quiet)')`)
	tab.picture("hostile")
	if eval[bool](tab, `'evil' in window || document.querySelector('img, #app b *, script:not([src])') !== null`) {
		t.Error("a name has become markup")
	}
	if n := eval[int](tab, `document.body.innerText.split('<img src=x').length`); n < 5 {
		t.Errorf("the names are shown %d times as they are", n-1)
	}
	asked := make(chan struct{}, 1)
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		select {
		case asked <- struct{}{}:
		default:
		}
	}))
	defer elsewhere.Close()
	tab.expectsErrors.Store(true)
	for what, script := range map[string]string{
		"markup":  `try { document.body.innerHTML = '<i>'; 'taken' } catch (e) { e.name }`,
		"code":    `try { setTimeout('window.evil = 1'); 'taken' } catch (e) { e.name }`,
		"scripts": `try { document.createElement('script').textContent = 'window.evil = 1'; 'taken' } catch (e) { e.name }`,
		"fetches": `fetch('` + elsewhere.URL + `', { mode: 'no-cors' }).then(() => 'taken', (e) => e.name)`,
		"images":  `new Promise((done) => { const i = new Image(); i.onload = i.onerror = () => done('TypeError'); i.src = '` + elsewhere.URL + `'; })`,
	} {
		if got := eval[string](tab, script); got != "TypeError" {
			t.Errorf("the page's policy lets %s in: %s", what, got)
		}
	}
	if len(asked) > 0 {
		t.Error("the page loads something from elsewhere")
	}
}

// A page of another origin learns nothing, even if it knows the token, and nor does one whose name leads here.
func TestOtherOrigins(t *testing.T) {
	s := serve(t, "--snapshot", file(t, snapshottest.New(1, 1)))
	tries := fmt.Sprintf(`Promise.all([
		...['stream', 'why?namespace=a&pod=b', 'at?from=0&time=0'].flatMap((path) => [
			fetch('%[1]s/api/' + path, { headers: { Authorization: 'Bearer %[2]s' } }).then((r) => r.text(), (e) => 'refused'),
			fetch('%[1]s/api/' + path, { mode: 'no-cors' }).then((r) => r.type + r.text.length, (e) => 'refused'),
		]),
		fetch('%[1]s/').then((r) => r.text(), (e) => 'refused'),
		new Promise((done) => { const e = new EventSource('%[1]s/api/stream'); e.onmessage = () => done('told'); e.onerror = () => (e.close(), done('refused')); }),
		new Promise((done) => { const e = document.createElement('script'); e.src = '%[1]s/map.js'; e.onload = () => done('ran'); e.onerror = () => done('refused'); document.head.append(e); }),
		new Promise((done) => { const f = document.createElement('iframe'); f.src = '%[1]s/'; f.onload = () => { let has = 'refused'; try { has = f.contentDocument?.querySelector('#app') ? 'framed' : 'refused' } catch { has = 'refused' } done(has + f.contentWindow.length); }; document.body.append(f); }),
	]).then((all) => all.join(' '))`, s.origin, s.token)
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte("<title>another page</title>"))
	}))
	defer other.Close()
	port, err := url.Parse(s.origin)
	if err != nil {
		t.Fatal(err)
	}
	browser := newBrowser(t, chromedp.Flag("host-resolver-rules", "MAP evil.example 127.0.0.1"))
	for _, page := range []string{other.URL, strings.Replace(other.URL, "127.0.0.1", "localhost", 1)} {
		tab := browser.tab()
		tab.expectsErrors.Store(true)
		tab.run(chromedp.Navigate(page))
		if got, want := eval[string](tab, tries), strings.Repeat("refused ", 9)+"refused0"; got != want {
			t.Errorf("from %s: %s, want %s", page, got, want)
		}
	}
	tab := browser.tab()
	tab.expectsErrors.Store(true)
	tab.run(chromedp.Navigate("http://evil.example:" + port.Port() + "/"))
	if got := eval[string](tab, `document.body.innerText`); !strings.Contains(got, `host "evil.example:`+port.Port()+`": this server answers to`) {
		t.Errorf("under another name it says %q", got)
	}
	// Without the token the page says what to do.
	tab = browser.tab()
	tab.expectsErrors.Store(true)
	tab.run(chromedp.Navigate(s.origin))
	tab.waitFor(`document.querySelector('.notices').innerText.includes('open the address that kubectl stowage map has printed')`)
	// With it, a reload works, and the address bar does not show it.
	tab = browser.tab(chromedp.Navigate(s.page))
	tab.waitFor(`document.querySelectorAll('.card').length === 1`)
	tab.run(chromedp.Reload())
	tab.waitFor(`document.querySelectorAll('.card').length === 1 && location.href === ` + quoted(s.origin+"/"))
}

func choose(tab *browser, label, value string) {
	tab.t.Helper()
	eval[bool](tab, fmt.Sprintf(`(() => {
		const select = document.querySelector('select[aria-label="%s"]');
		select.value = %s;
		select.dispatchEvent(new Event('change', { bubbles: true }));
		return true;
	})()`, label, quoted(value)))
}

func search(tab *browser, text string) {
	tab.t.Helper()
	eval[bool](tab, fmt.Sprintf(`(() => {
		const input = document.querySelector('input[type=search]');
		input.value = %s;
		input.dispatchEvent(new Event('input', { bubbles: true }));
		return true;
	})()`, quoted(text)))
}

// The page in light and dark and in a narrow window, and for the manual (docs/images/map.png), for people to look at; and its colors are apart enough in both.
func TestPictures(t *testing.T) {
	s := serve(t, "--snapshot", file(t, varied(40)))
	browser := newBrowser(t)
	for _, tc := range []struct {
		name, scheme  string
		width, height int64
	}{{"light", "light", 1440, 900}, {"dark", "dark", 1440, 900}, {"narrow", "light", 420, 860}, {"manual", "light", 1140, 700}} {
		tab := browser.tab(size(tc.width, tc.height), scheme(tc.scheme), chromedp.Navigate(s.page))
		tab.waitFor(`document.querySelectorAll('.card').length > 4`)
		if tc.width > 1000 {
			eval[bool](tab, `document.querySelector('.why').click(), true`)
			tab.waitFor(`document.querySelector('.answer p:not(.quiet)')`)
			eval[bool](tab, `document.querySelector('.grid .gpu.partitioned').dispatchEvent(new MouseEvent('mouseover', { bubbles: true })), true`)
			tab.waitFor(`document.querySelector('.hover')`)
		}
		tab.picture(tc.name)
		for state, ratio := range eval[map[string]float64](tab, contrasts) {
			if ratio < 4.5 {
				t.Errorf("%s: the text of state %s has a contrast of %.1f, want 4.5 (WCAG 2.2, 1.4.3)", tc.name, state, ratio)
			}
		}
		if wide := eval[int64](tab, `document.documentElement.scrollWidth`); wide > tc.width {
			t.Errorf("%s: the page is %d pixels wide in a window of %d", tc.name, wide, tc.width)
		}
	}
	// The switch wins over the system.
	tab := browser.tab(scheme("light"), chromedp.Navigate(s.page))
	tab.waitFor(`document.querySelectorAll('.card').length > 4`)
	before := eval[string](tab, `getComputedStyle(document.body).backgroundColor`)
	eval[bool](tab, `document.querySelector('input[name=theme][value=dark]').click(), true`)
	tab.waitFor(`getComputedStyle(document.body).backgroundColor !== ` + quoted(before))
}

// contrasts are those of the text of each state that is shown, https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio.
const contrasts = `(() => {
	const light = (color) => {
		const [r, g, b] = color.match(/[\d.]+/g).slice(0, 3).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
		return 0.2126 * r + 0.7152 * g + 0.0722 * b;
	};
	const ratios = {};
	for (const cell of document.querySelectorAll('.grid .gpu')) {
		const style = getComputedStyle(cell);
		const state = cell.classList[1];
		if (state === 'tainted' || ratios[state]) continue; // it is striped
		const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x);
		ratios[state] = (a + 0.05) / (b + 0.05);
	}
	return ratios;
})()`

// What a screen reader is told: a grid with a row for each node and a name for each cell and control. Motion stops where it is not wanted.
func TestAccessibility(t *testing.T) {
	s := serve(t, "--snapshot", file(t, varied(10)))
	tab := newBrowser(t).tab(call(emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-reduced-motion", Value: "reduce"}},
	}), chromedp.Navigate(s.page))
	tab.waitFor(`document.querySelectorAll('.card').length === 10`)
	eval[bool](tab, `document.querySelector('.grid .gpu').click(), true`)
	tab.waitFor(`document.querySelector('.pinned')`)
	tree, err := chromedp.Call(tab.ctx, accessibility.GetFullAXTree, accessibility.GetFullAXTreeParams{})
	if err != nil {
		t.Fatal(err)
	}
	roles := map[string]int{}
	named := map[string]bool{"button": true, "gridcell": true, "rowheader": true, "combobox": true, "searchbox": true, "radio": true, "grid": true}
	for _, node := range tree.Nodes {
		if node.Ignored || node.Role == nil {
			continue
		}
		role := strings.Trim(string(node.Role.Value), `"`)
		roles[role]++
		if named[role] && (node.Name == nil || strings.Trim(string(node.Name.Value), `" `) == "") {
			t.Errorf("a %s has no name", role)
		}
	}
	for role, want := range map[string]int{"grid": 1, "row": 10, "rowheader": 10, "gridcell": 81, "banner": 1, "main": 1, "complementary": 1, "search": 1, "status": 1} {
		if roles[role] != want {
			t.Errorf("%d of role %s, want %d: %v", roles[role], role, want, roles)
		}
	}
	if moving := eval[int](tab, `document.querySelector('.grid .gpu').classList.add('fresh'), document.getAnimations().length`); moving != 0 {
		t.Errorf("%d animations where the system wants none", moving)
	}
}

// Each GPU of a node has a number of its own, as the node agent names them, too: the address on the bus, which ends with the same digit.
func TestNumbersOfGPUs(t *testing.T) {
	for name, device := range map[string]string{"by number": "gpu-%d", "by address": "gpu-0000-%02d-00-0"} {
		t.Run(name, func(t *testing.T) {
			c := snapshottest.New(1, 8)
			for g := range 8 {
				c.ResourceSlices[0].Spec.Devices[g].Name = fmt.Sprintf(device, g)
			}
			s := serve(t, "--snapshot", file(t, c))
			tab := newBrowser(t).tab(chromedp.Navigate(s.page))
			tab.waitFor(`document.querySelectorAll('.grid .gpu').length === 8`)
			got := eval[string](tab, `[...document.querySelectorAll('.grid .gpu')].map((cell) => cell.innerText).join(' ')`)
			if want := "0 1 2 3 4 5 6 7"; got != want {
				t.Errorf("the cells have %s, want %s", got, want)
			}
		})
	}
}
