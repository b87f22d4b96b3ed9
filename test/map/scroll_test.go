// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package maptest

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/performance"
	"github.com/chromedp/chromedp"

	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// timesCopy is how much more than the reference a step of scrolling may cost the page's main thread. It is 1.1 to 1.4; if each step drew all
// rows of the window anew, it would be 5 to 10.
const timesCopy = 2.0

// 5,000 nodes of 8 GPUs: what is drawn is what is in the window, and scrolling is fluent. A step costs little more than the reference: a list
// of the same elements that only copies its rows, in the same browser. Milliseconds and frames a second are logged and not judged: they are
// the machine's, which draws without a graphics card.
func TestLargeCluster(t *testing.T) {
	c := snapshottest.Full(5000)
	c.Pod("team-0", "four", 4, 0)
	s := serve(t, "--snapshot", file(t, c))
	tab := newBrowser(t).tab(size(1440, 900), chromedp.Navigate(s.page))
	tab.waitFor(`document.querySelector('.totals').innerText === '40,000 GPUs on 5,000 nodes'`)
	tab.run(call(performance.Enable, performance.EnableParams{}))
	for _, density := range []string{"cards", "compact"} {
		choose(tab, "Size of cards", density)
		tab.waitFor(`document.querySelector('.grid.` + density + `')`)
		var result struct {
			Frames, Blank, Cards int
			Seconds, Longest     float64
		}
		if err := json.Unmarshal([]byte(eval[string](tab, scrolls)), &result); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %.0f frames a second while scrolling, the longest %.0f ms, %d cards drawn, %d frames without", density,
			float64(result.Frames)/result.Seconds, result.Longest, result.Cards, result.Blank)
		if result.Cards > 400 || result.Blank > 0 {
			t.Errorf("%s: %d cards drawn, %d frames of %d are blank", density, result.Cards, result.Blank, result.Frames)
		}
		ofPage, ofCopies := math.Inf(1), math.Inf(1)
		for range 3 { // a step costs more while the machine does something else, and never less
			reference, page := stepCosts(tab, copies), stepCosts(tab, pageScrolls)
			t.Logf("%s: a step of scrolling costs the page %s, the reference %s", density, told(page), told(reference))
			ofPage, ofCopies = min(ofPage, page[len(page)/2]), min(ofCopies, reference[len(reference)/2])
		}
		t.Logf("%s: half of the steps cost the page at most %.1f ms, the reference %.1f ms: %.2f times", density, ofPage, ofCopies, ofPage/ofCopies)
		if ofPage > timesCopy*ofCopies {
			t.Errorf("%s: a step of scrolling costs the page %.2f times the reference, want at most %.1f", density, ofPage/ofCopies, timesCopy)
		}
	}
	eval[bool](tab, `document.querySelector('.grid').scrollTop = 1e9, true`)
	tab.waitFor(`document.querySelector('[data-node="worker-4999"]')`)
	search(tab, "worker-4321 state:held")
	tab.waitFor(`document.querySelectorAll('.card').length === 1 && document.querySelectorAll('.grid .gpu:not(.dim)').length === 8`)
	search(tab, "pod:team-3/job-10-")
	tab.waitFor(`document.querySelectorAll('.card').length === 1 && document.querySelector('.card').dataset.node === 'worker-10'`)
	search(tab, "")
	choose(tab, "Order of nodes", "free")
	tab.waitFor(`[...document.querySelectorAll('.card')].every((card) => card.querySelector('.gpu.free'))`)
	tab.picture("5000-compact")
	choose(tab, "Size of cards", "cards")
	tab.waitFor(`document.querySelector('.grid.cards')`)
	tab.picture("5000-cards")
}

// scrolls scrolls for three seconds, a step with each frame. A frame is blank if there is no row in the middle of the window; between two rows
// there is a gap of ten pixels at most.
const scrolls = `new Promise((done) => {
	const grid = document.querySelector('.grid');
	grid.scrollTop = 0;
	let frames = 0, blank = 0, cards = 0, last = performance.now(), longest = 0;
	const start = last;
	const box = grid.getBoundingClientRect();
	const rowAt = (y) => document.elementFromPoint(box.left + 60, y)?.closest('.space .row');
	const frame = (now) => {
		frames++;
		longest = Math.max(longest, now - last);
		last = now;
		grid.scrollTop += 80;
		const middle = box.top + box.height / 2;
		if (!rowAt(middle) && !rowAt(middle + 11)) blank++;
		cards = Math.max(cards, document.querySelectorAll('.card').length);
		if (now - start < 3000) requestAnimationFrame(frame);
		else done(JSON.stringify({ Frames: frames, Blank: blank, Cards: cards, Seconds: (now - start) / 1000, Longest: longest }));
	};
	requestAnimationFrame(frame);
})`

// A list is scrolled: begin and end are before and after all steps, step is one.
type list struct{ begin, step, end string }

var (
	pageScrolls = list{
		begin: `window.list = document.querySelector('.grid')`,
		step:  `list.scrollTop += 80`,
	}
	// copies stands in the page's place. Rows that the window leaves go, and as many come at the end, as in the page.
	copies = list{
		begin: `
			const grid = document.querySelector('.grid');
			const top = (row) => parseFloat(row.style.top);
			window.list = grid.cloneNode(true);
			list.rows = [...list.querySelectorAll('.row')].sort((a, b) => top(a) - top(b));
			const pitch = top(list.rows[1]) - top(list.rows[0]);
			list.step = () => {
				list.scrollTop += 80;
				while (top(list.rows[0]) + pitch < list.scrollTop - 300) {
					const row = list.rows[0].cloneNode(true);
					row.style.top = top(list.rows.at(-1)) + pitch + 'px';
					list.rows.shift().remove();
					list.querySelector('.space').append(row);
					list.rows.push(row);
				}
			};
			grid.style.display = 'none';
			grid.after(list)`,
		step: `list.step()`,
		end: `
			list.remove();
			document.querySelector('.grid').style.display = ''`,
	}
)

// stepCosts scrolls a list 60 times, a frame after the other, and returns what each step cost the page's main thread, for scripts, styles,
// layout and painting, in milliseconds of processor time, least first. The first steps, in which nothing leaves the window yet, are left out.
func stepCosts(tab *browser, l list) []float64 {
	tab.t.Helper()
	then := func(script string) {
		eval[bool](tab, fmt.Sprintf(`new Promise((done) => {
			%s;
			requestAnimationFrame(() => requestAnimationFrame(() => done(true)));
		})`, script))
	}
	then(`document.querySelector('.grid').scrollTop = 0`)
	then(l.begin)
	costs := make([]float64, 0, 60)
	before := mainThread(tab)
	for range cap(costs) {
		then(l.step)
		after := mainThread(tab)
		costs = append(costs, 1000*(after-before))
		before = after
	}
	then(l.end)
	costs = costs[5:]
	slices.Sort(costs)
	return costs
}

// told says what the steps cost: half of them, 19 of 20, and all.
func told(costs []float64) string {
	n := len(costs)
	return fmt.Sprintf("%.1f ms (19 of 20 at most %.1f, all %.1f)", costs[n/2], costs[n*19/20], costs[n-1])
}

// mainThread is how long the page's main thread has had a processor so far, in seconds.
func mainThread(tab *browser) float64 {
	tab.t.Helper()
	result, err := chromedp.Call(tab.ctx, performance.GetMetrics, cdp.Empty{})
	if err != nil {
		tab.t.Fatal(err)
	}
	i := slices.IndexFunc(result.Metrics, func(m *performance.Metric) bool { return m.Name == "ThreadTime" })
	if i < 0 {
		tab.t.Fatal("the browser does not tell the time of its main thread")
	}
	return result.Metrics[i].Value
}
