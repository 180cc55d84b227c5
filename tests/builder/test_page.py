"""The page in headless Chromium, used as people use it."""

from __future__ import annotations

import json

import pytest

from tests.builder.pages import Page, browser, served
from tests.builder.states import PLAN
from tests.support.needs import needs
from tests.support.sampling import nightly
from zerotune.builder import create_app
from zerotune.plan import DeepSpeedPlan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chromium():
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("builder")


@pytest.fixture(scope="module")
def address(place):
    app = create_app(root=place, plan_file=place / "plan.json")
    with served(app) as where:
        yield where


@pytest.fixture
def context(chromium):
    opened = chromium.new_context(viewport={"width": 1300, "height": 900})
    yield opened
    opened.close()


@pytest.fixture
def page(context, address, place):
    (place / "plan.json").unlink(missing_ok=True)
    opened = Page(context, address)
    yield opened
    assert opened.complaints == []


def test_every_option_can_be_switched(page):
    """Every control of the form is used, and the configuration has the chosen values."""
    tab = page.tab
    for details in tab.locator("details.card").all():
        details.locator("summary").first.click()
    choices = tab.locator("input[data-kind=choice]").all()
    assert len(choices) > 15
    for choice in choices:
        choice.check()
        page.settle()
        assert choice.is_checked()
        if choice.get_attribute("data-store") == "config":
            for path, value in json.loads(choice.get_attribute("data-sets")).items():
                assert at(page, path) == value or value in (None, "none", 0, False)
    for flag in tab.locator("select[data-kind=flag]").all():
        for value in ("true", "false", ""):
            flag.select_option(value)
            assert at(page, flag.get_attribute("data-path")) == {"true": True, "false": False}.get(
                value
            )
    for number in tab.locator("input[data-kind=value][data-store=config]").all():
        number.fill("7")
        assert at(page, number.get_attribute("data-path")) == 7
        number.fill("auto")
        assert at(page, number.get_attribute("data-path")) == "auto"
        number.fill("")
        assert at(page, number.get_attribute("data-path")) is None


def at(page, path):
    """Return the value at a path of the page's state, since an invalid plan has no JSON to read."""
    return page.tab.evaluate(
        """async (path) => {
            const { read } = await import(`${document.body.dataset.prefix}/static/state.js`);
            const value = read("config", path);
            return value === undefined ? null : value;
        }""",
        path,
    )


@pytest.mark.parametrize(("written", "shown"), [("1-bit Adam", "OneBitAdam")])
def test_an_alternative_spelling_selects_the_optimizer_it_means(page, written, shown):
    config = {**PLAN, "optimizer": {"type": written, "params": {"lr": 1e-4}}}
    page.open_text(json.dumps(config))
    page.tab.wait_for_selector("#open-dialog", state="hidden")
    page.settle()
    assert page.tab.input_value("#optimizer-type") == shown
    assert page.tab.input_value("#optimizer-params-lr") == "0.0001"
    assert page.config() == config


def test_changing_the_optimizer_removes_arguments_that_it_lacks(page):
    page.tab.fill("#optimizer-params-eps", "1e-7")
    assert page.config()["optimizer"]["params"]["eps"] == 1e-7
    page.tab.select_option("#optimizer-type", "Lion")
    assert "eps" not in page.config()["optimizer"]["params"]
    assert page.config()["optimizer"]["params"]["lr"] == 1e-4


def test_messages_appear_beside_their_field(page):
    page.tab.fill("#config-gradient-clipping", "-1")
    page.settle()
    beside = page.tab.locator("#config-gradient-clipping-messages .message")
    beside.wait_for()
    assert beside.get_attribute("data-severity") == "error"
    assert page.tab.get_attribute("#config-gradient-clipping", "aria-invalid") == "true"
    assert page.tab.locator("#save-button").is_disabled()
    page.tab.locator("#general a").first.click()
    assert page.tab.evaluate("document.activeElement.id") == "config-gradient-clipping"
    page.tab.fill("#config-gradient-clipping", "1")
    page.settle()
    assert beside.count() == 0


def test_a_button_makes_every_change_of_its_fix(page):
    """One key is replaced, one moves below a section, and one becomes an object."""
    page.open_text(
        json.dumps(
            {
                "mixed_precision": "bf16",
                "optimizer": {"lr": 0.0001, "type": "AdamW"},
                "zero_optimization": 2,
            }
        )
    )
    page.tab.wait_for_selector("#open-dialog", state="hidden")
    for name in (
        "Remove mixed_precision, set bf16.enabled to true, for mixed_precision",
        "Move to optimizer.params.lr, for optimizer.lr",
        'Write {"stage": 2}, for zero_optimization',
    ):
        page.settle()
        page.tab.get_by_role("button", name=name, exact=True).click()
    page.settle()
    assert page.tab.locator(".message[data-severity=error]").count() == 0
    assert page.config() == {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }


def test_the_page_shows_exactly_the_opened_configuration(page):
    config = {
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 0, "stage3_model_persistence_threshold": 2**63 - 1},
        "flops_profiler": {"enabled": True},
    }
    page.open_text(json.dumps(config))
    page.tab.wait_for_selector("#open-dialog", state="hidden")
    page.settle()
    assert "9223372036854775807" in page.tab.locator("#output-json pre").text_content()
    assert page.config() == config


def test_nothing_covers_the_focused_element(chromium, address):
    """The sizes are those of phones, tablets, screens, and a screen at 200 % zoom."""
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    page = Page(context, address)
    page.tab.fill("#setup-vram", "2")
    page.tab.fill("#setup-ram", "2")
    page.tab.select_option("#optimizer-type", "Muon")
    page.settle()
    assert page.tab.locator("#counts .count").all_text_contents() == [
        "does not fit", "3 warnings",
    ]  # fmt: skip
    said = page.tab.locator("#verdict").text_content()
    assert said == "Runs, but does not fit: GPU, RAM."
    look(page)
    for width, height in ((390, 844), (720, 450), (768, 1024), (961, 700), (1440, 900)):
        page.tab.set_viewport_size({"width": width, "height": height})
        page.tab.evaluate("scrollTo(0, 2000)")
        box = page.tab.locator(".bar").bounding_box()
        covered = max(0, min(box["y"] + box["height"], height))
        assert covered <= height / 10, (width, box)
        inside = page.tab.evaluate("document.documentElement.scrollWidth")
        assert inside <= width, "nothing is broken letter by letter or runs out of the page"
        strip = page.tab.locator("#strip")
        narrow = width < 961
        assert strip.is_visible() == narrow, "memory stays near where it is not beside the form"
        if narrow:
            box = strip.bounding_box()
            assert box["y"] + box["height"] == pytest.approx(height, abs=1)
            assert box["height"] <= height / 10
            assert "GPU" in strip.text_content()
        focused, hidden = page.tab.evaluate(FOCUS_EACH)
        assert focused > 50
        assert hidden == [], width
    context.close()


FOCUS_EACH = """() => {
    const over = [...document.querySelectorAll(".bar, .strip")]
        .filter((each) => ["sticky", "fixed"].includes(getComputedStyle(each).position))
        .filter((each) => each.getBoundingClientRect().height);
    const each = [...document.querySelectorAll("main :is(input, select, button, summary, pre, a)")]
        .filter((one) => one.checkVisibility() && !one.disabled);
    const hidden = [];
    document.activeElement.blur();
    for (const direction of [each, [...each].reverse()]) {
        for (const one of direction) {
            one.focus();
            const mine = one.getBoundingClientRect();
            const outside = mine.bottom <= 0 || mine.top >= innerHeight;
            const beneath = over.some((cover) => {
                const theirs = cover.getBoundingClientRect();
                return mine.top < theirs.bottom - 1 && mine.bottom > theirs.top + 1 &&
                    mine.height < innerHeight / 2;
            });
            if (outside || beneath) hidden.push(one.id || one.textContent);
        }
    }
    return [each.length, hidden];
}"""


def test_frames_are_requested_only_for_video_models(page):
    frames = page.tab.locator("#setup-frames")
    assert frames.is_hidden()
    page.tab.select_option("#setup-family", '"wan-1.3b"')
    page.settle()
    assert frames.is_visible()
    assert frames.get_attribute("placeholder") == "→ 81"
    frames.fill("17")
    page.tab.wait_for_selector("text=17 frames of 640 x 640")
    page.tab.select_option("#setup-family", '"sdxl"')
    page.tab.wait_for_selector("text=1024 x 1024")
    assert frames.is_hidden()


def test_fit_my_card_offers_plans_that_a_click_applies(page):
    page.tab.fill("#setup-lora", "16")
    page.settle()
    page.tab.select_option("#setup-base-dtype", '"nf4"')
    page.tab.fill("#setup-lora", "")
    page.settle()
    page.tab.click("#fit-button")
    line = page.tab.locator("#fit-results .error-line")
    line.wait_for()
    assert "can only be trained through LoRA adapters" in line.text_content()
    page.tab.locator("#fit-dialog [data-close]").click()
    page.tab.select_option("#setup-base-dtype", '""')
    page.tab.fill("#setup-vram", "4")
    page.tab.click("#fit-button")
    page.tab.wait_for_selector("#fit-results .candidate")
    assert page.tab.locator("#fit-results .candidate:visible").count() == 5
    said = page.tab.locator("#fit-results .hint").all_text_contents()
    assert sum("also fits" in each.lower() for each in said) <= 2, (
        "once for the few, once for the rest"
    )
    assert "s per step" in page.tab.locator("#fit-results .candidate").first.text_content()
    page.tab.locator("#fit-results summary").click()
    assert page.tab.locator("#fit-results .candidate:visible").count() > 10
    rejected = page.tab.locator("#fit-results .candidate[data-fits=false]")
    assert "missing" in rejected.first.text_content()
    page.tab.locator("#fit-results .candidate button").first.click()
    assert page.config()["zero_optimization"]["stage"] == 3
    assert page.tab.locator("#counts").text_content() == "runs and fits"


def test_an_answer_to_an_outdated_form_is_not_shown(page):
    page.tab.evaluate(
        """() => {
          const asked = window.fetch;
          window.back = [asked, window.setTimeout];
          window.arrived = new Promise((arrived) => {
            window.fetch = async (...request) => {
              const answer = await asked(...request);
              await new Promise((release) => { window.release = release; arrived(); });
              return answer;
            };
          });
        }"""
    )
    page.tab.fill("#config-gradient-clipping", "0.25")
    page.tab.evaluate("window.arrived")
    # Never send the next request, so that the answer to the first arrives before it.
    page.tab.evaluate("window.setTimeout = () => 0")
    page.tab.fill("#config-gradient-clipping", "0.5")
    page.tab.evaluate("window.release()")
    page.tab.wait_for_timeout(200)
    assert page.tab.locator("body").get_attribute("data-state") == "waiting"
    shown = page.tab.locator("#output-json pre").text_content()
    assert '"gradient_clipping": 0.25' not in shown
    page.tab.evaluate("[window.fetch, window.setTimeout] = window.back")
    page.tab.fill("#config-gradient-clipping", "0.75")
    page.wait_for("gradient_clipping", 0.75)


def undo(page, key="Control+z"):
    page.tab.keyboard.press(key)
    page.settle()
    return page.tab.locator("#status").text_content()


def test_every_change_can_be_undone_and_redone(page):
    shown = [page.config()]
    field = page.tab.locator("#config-gradient-clipping")
    field.click()
    for key in ("Control+a", "0", ".", "5"):
        field.press(key)
    shown.append(page.config())
    for change in (
        lambda: page.tab.locator("#config-zero-optimization-stage-3").check(),
        lambda: page.tab.select_option("#optimizer-type", "Lion"),
        lambda: page.tab.fill("#optimizer-params-weight-decay", "0.3"),
        lambda: page.tab.select_option("#setup-ema", '"host"'),
        lambda: page.use_builtin_over("SDXL on two GPUs"),
    ):
        change()
        shown.append(page.config())
    said = []
    for before in reversed(shown[:-1]):
        said.append(undo(page))
        assert page.config() == before
    assert page.tab.locator("#undo").is_disabled()
    assert said == [
        "Undone: the template SDXL on two GPUs.",
        "Undone: EMA of the weights.",
        "Undone: weight_decay.",
        "Undone: Optimizer.",
        "Undone: ZeRO stage.",
        "Undone: Gradient clipping.",
    ]
    assert page.tab.input_value("#setup-ema") == '"none"'
    assert field.input_value() == "1"
    for after in shown[1:]:
        assert undo(page, "Control+Shift+z").startswith("Redone: ")
        assert page.config() == after
    assert page.tab.locator("#redo").is_disabled()
    page.tab.click("#undo")
    page.tab.fill("#config-gradient-clipping", "2")
    page.settle()
    assert page.tab.locator("#redo").is_disabled(), "another change takes the place of those undone"


def reload(page):
    page.tab.reload()
    page.tab.wait_for_selector("body[data-loaded=true]")
    page.settle()


def test_a_reload_loses_nothing(page, place):
    page.tab.fill("#setup-vram", "11")
    page.tab.fill("#config-gradient-clipping", "0.5")
    page.settle()
    reload(page)
    assert page.config()["gradient_clipping"] == 0.5
    assert page.tab.input_value("#setup-vram") == "11"
    page.tab.get_by_role("button", name="Discard it").click()
    assert page.config()["gradient_clipping"] == 1
    # Changes saved to another file are not in the plan file, so a reload restores them too.
    page.use_builtin("SDXL on 24 GB")
    page.tab.fill("#config-gradient-clipping", "0.125")
    page.tab.click("#save-button")
    page.tab.fill("#save-path", "elsewhere.json")
    page.tab.press("#save-path", "Enter")
    page.tab.wait_for_selector("#save-dialog", state="hidden")
    reload(page)
    assert page.config()["gradient_clipping"] == 0.125
    # Applied changes are in the file: a reload reads the file, even if another program wrote it.
    page.tab.click("#apply-button")
    page.tab.wait_for_selector("#status[data-kind=good]:has-text('Applied')")
    (place / "plan.json").write_text(json.dumps({**PLAN, "gradient_clipping": 0.25}))
    reload(page)
    assert page.config()["gradient_clipping"] == 0.25
    # A draft based on an older file does not overwrite the current one.
    page.tab.fill("#config-gradient-clipping", "0.75")
    page.settle()
    (place / "plan.json").write_text(json.dumps({**PLAN, "gradient_clipping": 0.1}))
    reload(page)
    assert page.config()["gradient_clipping"] == 0.75
    assert "has changed" in page.tab.locator("#status").text_content()
    page.tab.click("#apply-button")
    page.tab.get_by_role("button", name="Open it again").click()
    page.tab.click("#ask-do")
    page.tab.wait_for_selector("#status[data-kind=good]:has-text('Opened')")
    assert page.config()["gradient_clipping"] == 0.1


def test_the_page_asks_before_it_discards_changes(page, place):
    (place / "there.json").write_text("{}")
    page.tab.fill("#config-gradient-clipping", "0.5")
    page.settle()
    page.tab.click("#templates-button")
    page.tab.get_by_role("button", name="Use SDXL on 8 GB", exact=True).click()
    page.tab.wait_for_selector("#ask-dialog[open]")
    page.tab.keyboard.press("Escape")
    page.tab.locator("#templates-dialog [data-close]").click()
    page.tab.click("#reset")
    page.tab.locator("#ask-dialog [data-close]").click()
    assert page.config()["gradient_clipping"] == 0.5
    page.tab.click("#save-button")
    page.tab.fill("#save-path", "there.json")
    page.tab.press("#save-path", "Enter")
    page.tab.locator("#save-error:has-text('already exists')").wait_for()
    assert (place / "there.json").read_text() == "{}"
    page.tab.get_by_role("button", name="Overwrite it").click()
    page.tab.wait_for_selector("#save-dialog", state="hidden")
    assert json.loads((place / "there.json").read_text())["gradient_clipping"] == 0.5
    assert (place / "there.json.bak").read_text() == "{}"
    # Nothing is unsaved now, so no question is asked.
    page.use_builtin("SDXL on 8 GB")
    page.tab.fill("#setup-vram", "11")
    page.tab.select_option("#optimizer-type", "Lion")
    page.settle()
    page.tab.click("#reset")
    page.tab.keyboard.press("Tab")
    page.tab.keyboard.press("Enter")
    page.tab.wait_for_selector("#status[data-kind=good]:has-text('Reset')")
    assert page.config()["optimizer"]["type"] == "AdamW"
    assert page.tab.input_value("#setup-vram") == "11"


def test_the_configuration_text_can_be_edited_in_place(page):
    page.tab.fill("#config-gradient-clipping", "-1")
    page.settle()
    page.tab.click("#edit")
    assert json.loads(page.tab.input_value("#editor-text"))["gradient_clipping"] == -1
    page.tab.fill("#editor-text", '{\n  "zero_optimization": {\n    "stage": }}')
    page.tab.press("#editor-text", "Control+Enter")
    page.tab.locator("#editor-error:has-text('Line 3, column 14')").wait_for()
    start = page.tab.evaluate("document.querySelector('#editor-text').selectionStart")
    assert page.tab.input_value("#editor-text")[start] == "}"
    page.tab.fill("#editor-text", json.dumps({**PLAN, "elasticity": {"enabled": True}}))
    page.tab.press("#editor-text", "Control+Enter")
    page.tab.wait_for_selector("#editor", state="hidden")
    page.settle()
    assert page.tab.evaluate("document.activeElement.id") == "edit"
    # A key without a field is removed by the button beside its message.
    page.tab.get_by_role("button", name="Remove elasticity, for elasticity").click()
    assert page.config() == PLAN
    undo(page)
    undo(page)
    assert page.tab.input_value("#config-gradient-clipping") == "-1"


def test_pending_and_outdated_results_are_marked(page):
    tab = page.tab
    waiting = []

    def hold(route):
        waiting.append(route)

    tab.route("**/api/preview", hold)
    tab.fill("#config-gradient-clipping", "0.5")
    assert tab.get_attribute("body", "data-state") == "waiting"
    assert tab.get_attribute("#results", "aria-busy") == "true"
    tab.wait_for_function("getComputedStyle(document.body, '::after').content"
                          " === '\"checking…\"'")  # fmt: skip
    while not waiting:
        tab.wait_for_timeout(20)
    waiting.pop().abort()
    tab.wait_for_selector("body[data-state=stale]")
    tab.unroute("**/api/preview")
    tab.get_by_role("button", name="Try again").click()
    assert page.config()["gradient_clipping"] == 0.5
    assert tab.get_attribute("#results", "aria-busy") == "false"


def test_an_invalid_plan_shows_no_running_configuration(page):
    assert "Run by" in page.tab.locator("#optimizer-about").text_content()
    page.tab.fill("#config-gradient-clipping", "-1")
    page.settle()
    page.tab.click("#tab-running")
    shown = page.tab.locator("#output-running pre").text_content()
    assert shown == "Correct the errors to see the running configuration."
    assert "Run by" not in page.tab.locator("#optimizer-about").text_content()
    arrows = page.tab.locator("#form input:not([data-store=setup])").evaluate_all(
        "inputs => inputs.filter((input) => input.placeholder.includes('→')).map((each) => each.id)"
    )
    assert arrows == []


def test_two_tabs_do_not_overwrite_each_others_plan(page, context, address, place):
    other = Page(context, address)
    page.tab.click("#apply-button")
    page.tab.wait_for_selector("#status[data-kind=good]:has-text('Applied')")
    other.tab.fill("#config-gradient-clipping", "0.25")
    other.settle()
    other.tab.click("#apply-button")
    other.tab.wait_for_selector("#status[data-kind=error]")
    assert json.loads((place / "plan.json").read_text())["gradient_clipping"] == 1.0
    other.tab.get_by_role("button", name="Overwrite it").click()
    other.tab.wait_for_selector("#status[data-kind=good]")
    assert json.loads((place / "plan.json").read_text())["gradient_clipping"] == 0.25
    assert other.complaints == []


def test_the_page_works_with_the_keyboard_alone(page, place):
    """Keys alone reach stage 3, clipping 0.5, the text view, the templates, a file, and Apply."""
    press = page.tab.keyboard.press

    def tab_to(wanted, *, back=False):
        for _ in range(80):
            press("Shift+Tab" if back else "Tab")
            if page.tab.evaluate("document.activeElement.id") == wanted:
                return
        pytest.fail(f"{wanted} cannot be reached")

    tab_to("open-button")
    press("Enter")
    assert page.tab.locator("#open-dialog").is_visible()
    press("Escape")
    assert page.tab.evaluate("document.activeElement.id") == "open-button"
    tab_to("config-zero-optimization-stage-2")
    press("ArrowRight")
    tab_to("config-gradient-clipping")
    press("Control+A")
    page.tab.keyboard.type("0.5")
    page.wait_for("gradient_clipping", 0.5)
    assert page.config()["zero_optimization"]["stage"] == 3
    tab_to("tab-json")
    press("ArrowRight")
    assert page.tab.get_attribute("#tab-running", "aria-selected") == "true"
    press("ArrowLeft")
    tab_to("edit")
    press("Enter")
    press("Control+A")
    page.tab.keyboard.type(json.dumps({**PLAN, "gradient_clipping": 0.25}))
    press("Control+Enter")
    page.wait_for("gradient_clipping", 0.25)
    assert page.tab.evaluate("document.activeElement.id") == "edit"
    press("Control+z")
    page.wait_for("gradient_clipping", 0.5)
    tab_to("templates-button", back=True)
    press("Enter")
    assert page.tab.locator("#templates-dialog").is_visible()
    press("Escape")
    assert page.tab.evaluate("document.activeElement.id") == "templates-button"
    tab_to("open-button", back=True)
    press("Enter")
    tab_to("open-path")
    page.tab.keyboard.type("typed.json")
    (place / "typed.json").write_text(json.dumps({**PLAN, "zero_optimization": {"stage": 3}}))
    press("Enter")
    page.tab.wait_for_selector("#ask-dialog[open]")
    press("Tab")
    assert page.tab.evaluate("document.activeElement.id") == "ask-do"
    press("Enter")
    page.tab.wait_for_selector("#open-dialog", state="hidden")
    page.wait_for("gradient_clipping", 1.0)
    tab_to("apply-button")
    press("Enter")
    page.tab.wait_for_selector("#status[data-kind=good]:has-text('Applied')")
    assert json.loads((place / "plan.json").read_text())["zero_optimization"]["stage"] == 3


# The dark scheme differs in its colours only.
@pytest.mark.parametrize(
    ("scheme", "only"), [("light", {}), *nightly(("dark", {"runOnly": ["color-contrast"]}))]
)
def test_axe_finds_no_accessibility_violation(chromium, address, scheme, only):
    """axe checks every state of the page."""
    axe = needs("axe_playwright_python.sync_playwright").Axe()
    context = chromium.new_context(viewport={"width": 1300, "height": 900})
    page = Page(context, address)
    page.tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    options = {"resultTypes": ["violations"], **only}
    for prepare in (
        *(look, look_at_messages, look_at_warnings, look_at_text, look_at_fit, look_at_nothing),
        *(look_at_templates, look_at_question, look_at_open, look_at_save, look_at_conflict),
        look_at_phone,
    ):
        prepare(page)
        # Everything behind a dialog was checked before, and cannot be reached.
        on_top = page.tab.locator("dialog[open]").count()
        inside = f"#{page.tab.evaluate(TOPMOST)}" if on_top else None
        found = axe.run(page.tab, context=inside, options=options).response
        assert found["passes"]
        assert [
            (each["id"], [node["html"][:120] for node in each["nodes"][:3]])
            for each in found["violations"]
        ] == [], prepare.__name__
    context.close()


TOPMOST = "document.activeElement.closest('dialog').id"


def look(page):
    for details in page.tab.locator("details.card").all():
        details.locator("summary").first.click()


def look_at_messages(page):
    page.tab.fill("#config-gradient-clipping", "-1")
    page.tab.fill("#setup-vram", "8")
    page.settle()
    page.tab.fill("#config-gradient-clipping", "1")
    page.tab.locator("#config-zero-optimization-offload-param-device-1").check()
    page.settle()


def look_at_fit(page):
    page.tab.click("#fit-button")
    page.tab.wait_for_selector("#fit-results .candidate")


def look_at_warnings(page):
    page.tab.locator("#config-zero-optimization-offload-param-device-0").check()
    page.tab.select_option("#optimizer-type", "Muon")
    page.settle()


def look_at_text(page):
    page.tab.click("#edit")
    page.tab.fill("#editor-text", "{")
    page.tab.press("#editor-text", "Control+Enter")
    page.tab.locator("#editor-error:not(:empty)").wait_for()


def look_at_nothing(page):
    page.tab.keyboard.press("Escape")
    page.tab.fill("#setup-vram", "1")
    page.settle()
    page.tab.click("#fit-button")
    page.tab.wait_for_selector("#fit-results .error-line")


def look_at_templates(page):
    page.tab.keyboard.press("Escape")
    page.tab.click("#templates-button")
    page.tab.wait_for_selector("#templates-dialog[open]")


def look_at_question(page):
    page.tab.get_by_role("button", name="Use SDXL on 8 GB", exact=True).click()
    page.tab.wait_for_selector("#ask-dialog[open]")


def look_at_open(page):
    page.tab.keyboard.press("Escape")
    page.tab.locator("#templates-dialog [data-close]").click()
    page.open_text("[1]")
    page.tab.locator("#open-error:not(:empty)").wait_for()


def look_at_save(page):
    page.tab.keyboard.press("Escape")
    page.tab.click("#editor-cancel")
    page.tab.click("#save-button")
    page.tab.fill("#save-path", "../outside.json")
    page.tab.press("#save-path", "Enter")
    page.tab.locator("#save-error:not(:empty)").wait_for()


def look_at_conflict(page):
    page.tab.keyboard.press("Escape")
    page.tab.route(
        "**/api/apply", lambda route: route.fulfill(status=409, json={"error": "Changed."})
    )
    page.tab.click("#apply-button")
    page.tab.wait_for_selector("#status[data-kind=error]")


def look_at_phone(page):
    page.tab.set_viewport_size({"width": 390, "height": 844})
    page.tab.wait_for_selector("#strip")


def test_the_first_links_skip_to_the_form_and_to_the_results(page):
    for words, target in (("Skip to the form", "form"), ("Skip to the results", "summary-title")):
        link = page.tab.locator(".skip", has_text=words)
        link.focus()
        assert link.bounding_box()["x"] >= 0
        page.tab.keyboard.press("Enter")
        assert page.tab.evaluate("document.activeElement.id") == target


def test_another_optimizer_name_can_be_typed(page):
    page.tab.select_option("#optimizer-type", "…")
    assert page.tab.evaluate("document.activeElement.id") == "optimizer-name"
    page.tab.fill("#optimizer-name", "FusedAdamW")
    assert page.config()["optimizer"]["type"] == "FusedAdamW"
    page.tab.fill("#optimizer-name", "OurOwn")
    page.tab.locator("#optimizer-messages .message[data-severity=error]").wait_for()
    page.tab.select_option("#optimizer-type", "Lion")
    page.settle()
    assert page.tab.locator("#optimizer-name").is_hidden()


def test_a_user_gets_from_a_12_gib_card_to_an_sdxl_file_that_fits(page, place):
    """The user picks the card by name, and sees the step time and its assumed rates."""
    page.tab.select_option("#setup-card", label="RTX 4070, 12 GiB")
    assert page.tab.input_value("#setup-vram") == "12"
    page.tab.click("#fit-button")
    page.tab.wait_for_selector("#fit-results .candidate")
    rates = "rates catalogued for RTX 4070 (12 GiB)"
    assert rates in page.tab.locator("#fit-rates").text_content()
    shown = page.tab.locator("#fit-results .candidate:visible .seconds b").all_text_contents()
    assert shown
    assert len(set(shown)) == len(shown), "the same seconds are said once"
    page.tab.locator("#fit-results .candidate button").first.click()
    page.settle()
    assert page.tab.locator("#verdict").text_content() == "Runs and fits."
    assert page.tab.locator("#time").text_content() == f"{shown[0]} per step, predicted; {rates}."
    page.save_as("of-the-journey.json")
    plan = DeepSpeedPlan.load(place / "of-the-journey.json")
    assert (plan.stage, plan.offload_optimizer_device) == (2, "cpu")
    # Another memory size unsets the card.
    page.tab.fill("#setup-vram", "4")
    page.settle()
    assert page.tab.locator("#verdict").text_content() == "Runs, but does not fit: GPU."
    assert page.tab.input_value("#setup-card") == '""'


def test_a_user_gets_to_qwen_image_adapters_that_fit_24_gib(page):
    """The whole model does not fit; the button switches to adapters, as the template does."""
    page.tab.select_option("#setup-family", label="Qwen-Image")
    page.tab.fill("#setup-vram", "24")
    page.tab.fill("#setup-ram", "32")
    page.tab.click("#fit-button")
    first = page.tab.locator("#fit-results .row").first
    assert "fits: " in first.text_content(), "what fits comes first"
    assert first.locator("button.primary").count() == 1
    assert page.tab.locator("#fit-results .row button.primary").count() == 1
    page.tab.get_by_role("button", name="Train LoRA adapters").click()
    page.tab.wait_for_selector("#fit-results .candidate[data-fits=true]")
    page.tab.locator("#fit-results .candidate button").first.click()
    page.settle()
    assert page.tab.input_value("#setup-lora") == "16"
    assert page.tab.input_value("#setup-base-dtype") == '"nf4"'
    assert page.tab.locator("#verdict").text_content() == "Runs and fits."


SIX_MISTAKES = """{
  "train_micro_batch_size_per_gpu": 1,
  "gradient_cliping": 1.0,
  "zero_optimization": {
    "stage": 3,
    "cpu_offload": true,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/swap"},
    "overlap_com": true,
  "optimizer": {"type": "Adamm", "params": {"lr": 0.0001}},
  "elasticity": {"enabled": true},
  "bf16": {"enabled": true}
}
"""


def test_a_user_repairs_a_file_with_six_mistakes(page, place):
    """A missing brace is shown where the parser misses it; the other mistakes have buttons."""
    page.open_text(SIX_MISTAKES)
    page.tab.locator("#open-error:has-text('Line 13, column 1')").wait_for()
    start = page.tab.evaluate("document.querySelector('#open-text').selectionStart")
    assert start == len(SIX_MISTAKES)
    page.tab.fill(
        "#open-text", SIX_MISTAKES.replace('"overlap_com": true,', '"overlap_com": true},')
    )
    page.tab.click("#open-do")
    page.tab.wait_for_selector("#open-dialog", state="hidden")
    page.settle()
    assert page.tab.locator("#counts").text_content() == "cannot run5 errors"
    texts = page.tab.locator(".message[data-severity=error]").all_text_contents()
    assert len(texts) == 5, "each once, at its field"
    toast, output = (page.tab.locator(one).bounding_box() for one in ("#toast", "#results"))
    assert output["y"] + output["height"] <= toast["y"], "the message covers nothing"
    for name in (
        "Rename to gradient_clipping, for gradient_cliping",
        "Remove cpu_offload, for zero_optimization.cpu_offload",
        "Rename to overlap_comm, for zero_optimization.overlap_com",
        "Write Adam, for optimizer.type",
        "Remove elasticity, for elasticity",
    ):
        page.tab.get_by_role("button", name=name, exact=True).click()
        page.settle()
    assert page.tab.locator(".message[data-severity=error]").count() == 0
    assert page.tab.locator("#counts").text_content().startswith("does not fit")
    page.tab.fill("#setup-nvme", "200")
    page.settle()
    assert page.tab.locator("#counts").text_content().startswith("runs and fits")
    page.tab.click("#apply-button")
    page.tab.wait_for_selector("#status[data-kind=good]:has-text('Applied')")
    written = json.loads((place / "plan.json").read_text())
    zero = written["zero_optimization"]
    assert list(written) == [
        *("train_micro_batch_size_per_gpu", "gradient_clipping", "zero_optimization"),
        *("bf16", "optimizer"),
    ]
    assert set(zero) == {"stage", "offload_optimizer", "overlap_comm"}
    assert written["gradient_clipping"] == 1.0
    assert undo(page).startswith("Undone: ")
